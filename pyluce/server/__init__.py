"""Serves a loaded model over HTTP: OpenAI's and Anthropic's APIs, metrics and a status page."""

from __future__ import annotations

from pyluce.server.app import create_app
from pyluce.server.serve import LuceServer, serve
from pyluce.server.settings import EffortBudgets, ServerSettings, SettingError

__all__ = ["EffortBudgets", "LuceServer", "ServerSettings", "SettingError", "create_app", "serve"]
