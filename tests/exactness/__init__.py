"""Logits are a function of the request alone: byte comparisons between schedules, each with a control that must fail."""
