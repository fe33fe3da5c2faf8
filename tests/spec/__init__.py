"""Where drafts come from, and how many are worth verifying: pure Python, by simulation."""
