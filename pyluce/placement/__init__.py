"""Where routed experts live: how often each was picked, which of them are hot, and how that set follows what is asked.

No native code: the graph room counts into it, the loader reads a hot set from it. docs/split.md describes it all.
"""
