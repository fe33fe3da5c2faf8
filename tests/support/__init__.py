"""What several test folders share: tiny models, forced runs, comparisons of logit bytes and of values."""
