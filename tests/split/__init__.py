"""Experts on a second device: the same bits wherever they are."""
