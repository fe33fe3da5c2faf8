"""What a model will take, planned from its header before anything is allocated, and what it takes, as a report.

`planner` is pure: header facts, options, memory sizes and a meter of graphs in, a plan out. `meter` asks ggml what a graph
would need without allocating it. Everything that decides whether a model fits goes through `planner.make_plan`.
"""
