"""From settings to a cache."""

from __future__ import annotations

from pathlib import Path

from modalmesh.base.settings import Settings
from router.cache.cache import AnswerCache
from router.cache.model import CacheOptions
from router.cache.shared import SharedTier

__all__ = ["directory", "from_settings", "options", "shared_tier"]


def directory(settings: Settings) -> Path:
    """Return where this node's cache lies."""
    return settings.cache.directory or settings.state_dir / "cache"


def shared_tier(settings: Settings) -> SharedTier | None:
    """Return the shared tier, None if there is none."""
    cache = settings.cache
    if not cache.shared:
        return None
    password = cache.shared_password.get_secret_value() if cache.shared_password else None
    return SharedTier(cache.shared, namespace=cache.namespace, username=cache.shared_username, password=password)


def options(settings: Settings) -> CacheOptions:
    """Return sizes and limits."""
    cache = settings.cache
    return CacheOptions(
        memory_bytes=cache.memory_mb << 20,
        disk_bytes=cache.disk_mb << 20,
        max_stale_s=cache.max_stale_s,
        misses_per_second=cache.misses_per_second,
        miss_burst=cache.miss_burst,
    )


def from_settings(settings: Settings) -> AnswerCache:
    """Return the cache of this process; ``start`` it, and ``close`` it.

    Raises:
        CacheFilesError: Its directory can't be used.
    """
    return AnswerCache(directory(settings), options=options(settings), shared=shared_tier(settings))
