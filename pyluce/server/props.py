"""GET /props: how the server runs, in the reference system's schema 2. Every key is always there; what is not known is null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyluce import __version__
from pyluce.engine.stats import Activity, EngineStats
from pyluce.engine.thinking import LARGEST_ANSWER_ROOM
from pyluce.options import LoadOptions
from pyluce.server import speculation
from pyluce.server.context import AppContext
from pyluce.server.memory import memory_section
from pyluce.server.settings import EFFORTS

PROPS_SCHEMA = 2
NAME = "luce"


def props(context: AppContext) -> dict[str, Any]:
    """The whole answer, from published numbers only."""
    service, settings = context.service, context.settings
    info, template, stats = service.info, service.template, service.stats()
    reasons = template is not None and template.has_reasoning
    sampling = settings.sampling
    efforts = settings.efforts
    return {
        "default_generation_settings": {
            "n_ctx": info.n_ctx,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repeat_penalty,
        },
        "model_alias": context.model_name,
        "model_path": str(info.path),
        "build_info": f"{NAME} v{__version__} props_schema={PROPS_SCHEMA}",
        "speculative_mode": speculation.mode(info.speculation),
        "server": {"name": NAME, "version": __version__, "props_schema": PROPS_SCHEMA},
        "model": {
            "arch": "qwen4exp",
            "draft_path": info.speculation.draft_path,
            "tokenizer_id": None,
            "name": info.name,
            "n_vocab": info.n_vocab,
            "n_layer": info.n_layer,
            "n_ctx_train": info.n_ctx_train,
            "size_bytes": info.size_bytes,
            "warnings": list(info.warnings),
        },
        "runtime": {
            "backend": service.options.device.partition(":")[0],
            "fa_window": None,
            "kv_cache_k": service.options.kv_type,
            "kv_cache_v": service.options.kv_type,
            "lazy_draft": None,
            "draft_residency": None,
            "target_sharding": None,
            "chunk": info.chunk or service.options.chunk,
            "target_device": service.options.device,
            "draft_device": None,
            "threads": info.threads,
            "slots": len(stats.slots),
            "max_queue": stats.max_queue,
            "tune": {"file": info.tuning.path, "digest": info.tuning.digest, "entries": info.tuning.entries},
        },
        "reasoning": {
            "supported": reasons,
            "default": None,
            "supported_efforts": list(EFFORTS) if reasons else [],
        },
        "model_card": None,
        "budget_envelope": {
            "model_card_source": None,
            "default_max_tokens": settings.default_max_tokens,
            "hard_limit_reply_budget": LARGEST_ANSWER_ROOM,
            "think_max_tokens": efforts.x_high if reasons else None,
            "effort_tiers": {effort: efforts.limit(effort) for effort in EFFORTS},
        },
        "speculative": speculation.section(info.speculation, stats),
        "sampling": {
            "capabilities": {
                "supports_temperature": True,
                "supports_top_p": True,
                "supports_top_k": True,
                "supports_min_p": True,
                "supports_frequency_penalty": True,
                "supports_presence_penalty": True,
                "supports_repetition_penalty": True,
                "supports_logit_bias": True,
                "supports_seed": True,
            }
        },
        "pflash": {"enabled": False, "mode": None},
        "prefix_cache": _prefix_cache(stats),
        "full_cache": _disk_cache(stats, service.options),
        "tool_replay": {"max_entries": 0, "max_bytes": 0, "current_entries": 0, "current_bytes": 0},
        "daemon": {
            "alive": stats.activity is not Activity.CLOSED,
            "parked": stats.parked is not None,
            "parked_reason": stats.parked,
            "park_after_s": service.options.park_after,
            "unpark_on_request": service.options.unpark_on_request,
        },
        "api": {"endpoints": list(context.endpoints)},
        "capabilities": {
            "reasoning_supported": reasons,
            "speculative_supported": True,
            "tools_supported": context.tools_supported,
        },
        "memory": memory_section(stats),
    }


def _prefix_cache(stats: EngineStats) -> dict[str, Any]:
    """The engine's last report. `capacity` is null: entries are bounded by bytes, not by number."""
    report = stats.memory.get("prefix_cache")
    kept: dict[str, Any] = dict(report) if isinstance(report, Mapping) else {}
    return {
        "capacity": None,
        "in_use": kept.get("entries", 0),
        "lifetime_hits": kept.get("hits", 0),
        "budget_bytes": kept.get("budget_bytes", 0),
        "used_bytes": kept.get("n_bytes", 0),
        "evictions": kept.get("evictions", 0),
    }


def _disk_cache(stats: EngineStats, options: LoadOptions) -> dict[str, Any]:
    """The entries in the cache folder, as of the engine's last report. `capacity` is null: they are bounded by bytes, not by number."""
    report = stats.memory.get("prefix_cache")
    found = report.get("disk") if isinstance(report, Mapping) else None
    kept: dict[str, Any] = dict(found) if isinstance(found, Mapping) else {}
    enabled = options.cache_dir is not None
    return {
        "enabled": enabled,
        "capacity": None if enabled else 0,
        "in_use": kept.get("entries", 0),
        "disk_bytes": kept.get("size_on_disk", 0),
        "lifetime_hits": kept.get("hits", 0),
        "disk_policy": "oldest leaf" if enabled else None,
        "budget_bytes": kept.get("size_limit", 0),
        "written": kept.get("written", 0),
        "failures": kept.get("failures", 0),
        "skipped": kept.get("skipped", 0),
    }
