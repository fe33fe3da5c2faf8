"""Many requests at once: what each gets, and what is left when all are gone."""
