"""Tests of pyluce.weights and of the writer of random models."""
