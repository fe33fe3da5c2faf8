"""Plans of memory against rules, literal figures and real allocations."""
