"""Tests of the HTTP application."""
