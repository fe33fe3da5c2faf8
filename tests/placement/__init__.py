"""Routing counts, hot sets and the learner: no model, no native code."""
