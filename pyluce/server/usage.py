"""`usage` and its `timings`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyluce.server.reply import End


def openai_usage(ends: Sequence[End], prompts: int = 1) -> dict[str, Any]:
    """OpenAI's `usage` over all choices. A prompt counts once however many choices continue it; `prompts` are different ones."""
    each = len(ends) // prompts
    prompt_tokens = sum(end.timings.prompt_tokens for end in ends[::each])
    completion_tokens = sum(end.timings.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(end.timings.cached_tokens for end in ends[::each])},
        "completion_tokens_details": {"reasoning_tokens": sum(end.reasoning_tokens for end in ends)},
        "timings": timings(ends),
    }


def timings(ends: Sequence[End]) -> dict[str, Any]:
    """Where the time went. Of several choices: the sum of the tokens, the longest of the times."""
    prompt_tokens = sum(end.timings.prompt_tokens for end in ends)
    cached = sum(end.timings.cached_tokens for end in ends)
    decode_ms = max(end.timings.decode_ms for end in ends)
    decoded = sum(end.timings.completion_tokens - 1 for end in ends)
    return {
        "queue_ms": round(max(end.timings.queue_ms for end in ends), 3),
        "prefill_ms": round(max(end.timings.prefill_ms for end in ends), 3),
        "decode_ms": round(decode_ms, 3),
        "decode_tokens_per_sec": round(1000.0 * decoded / decode_ms, 1) if decode_ms > 0 else 0.0,
        "cached_prefix_tokens": cached,
        "prefilled_tokens": prompt_tokens - cached,
        "effective_prompt_tokens": prompt_tokens,
        "cache_hit": cached > 0,
    }
