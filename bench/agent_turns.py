"""An agent's conversation of four turns: a tool call, its result, a question that six children take up, and their findings.

Turn 1 asks and must be answered by a call; turn 2 brings the tool's result; turn 3 asks on. Six children then continue the conversation at the
same time, each with a task of its own, and turn 4 gives the parent what they found. The client sends answers back without their
reasoning, or with it and lets the template strip it. What is said does not depend on the answers, but for the call's id and the
children's words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

N_CHILDREN = 6
WORDS = ("river", "stone", "bread", "window", "garden", "letter")

_NOTES = (
    "Note {n}: the traveller of day {n} asked about the harbour, the market and the bridge behind the old town, and was told to keep to "
    "the left bank until the lamp at house number {n}. The answer was short, named one place, and gave no number that was not asked for.\n"
)


def tool(name: str, description: str) -> dict[str, Any]:
    """A function of one city."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("get_weather", "Get the weather of a city."),
    tool("get_time", "Get the local time of a city."),
    tool("get_population", "Get the number of people in a city."),
]


@dataclass
class AgentConversation:
    """What was said so far.

    `notes`: paragraphs in the system message, about 75 tokens each for luce-tiny. `keep_reasoning`: the client sends reasoning back, and asks
    the template to strip it (`preserve_thinking`); otherwise it drops it. `max_tokens` limits each answer.
    """

    notes: int = 2
    keep_reasoning: bool = False
    max_tokens: int = 96
    messages: list[dict[str, Any]] = field(default_factory=list)
    added: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        text = "You are a helpful assistant.\n" + "".join(_NOTES.format(n=n + 1) for n in range(self.notes))
        self.messages = [{"role": "system", "content": text}]

    def ask(self, turn: int, findings: list[str]) -> dict[str, Any]:
        """Add the client's messages of turn 1 to 4, and return the request. `findings`: what the children answered, for turn 4."""
        if turn == 1:
            self.added = [{"role": "user", "content": "What is the weather in Paris?"}]
        elif turn == 2:
            call = self.messages[-1]["tool_calls"][0]
            self.added = [{"role": "tool", "content": "rain, 12 degrees", "tool_call_id": call["id"]}]
        elif turn == 3:
            self.added = [{"role": "user", "content": "What is the capital of France?"}]
        else:
            self.added = [
                {"role": "user", "content": "The six answered:\n" + "\n".join(findings) + "\nWhat is a river?"}
            ]
        self.messages += self.added
        return self._request(self.messages, "required" if turn == 1 else "auto")

    def children(self) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """The children's requests, and what each adds to the parent's conversation."""
        tasks = [[{"role": "user", "content": f"What does {word} mean?"}] for word in WORDS]
        return [(self._request([*self.messages, *task], "auto"), task) for task in tasks]

    def hear(self, message: dict[str, Any]) -> None:
        """Add the server's answer as the client keeps it."""
        said = {"role": "assistant", "content": message.get("content") or ""}
        if message.get("tool_calls"):
            said["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": call["function"]} for call in message["tool_calls"]
            ]
        if self.keep_reasoning and message.get("reasoning_content"):
            said["reasoning_content"] = message["reasoning_content"]
        self.messages = [*self.messages, said]

    def _request(self, messages: list[dict[str, Any]], tool_choice: str) -> dict[str, Any]:
        request = {
            "messages": list(messages),
            "tools": TOOLS,
            "tool_choice": tool_choice,
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        if self.keep_reasoning:
            request["chat_template_kwargs"] = {"preserve_thinking": False}
        return request
