"""Cache and state folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bakehouse.errors import HostError


@dataclass(frozen=True)
class _Below:
    """A path below one of the two folders."""

    root: str
    name: str

    def __get__(self, places: Places, _: type[Places]) -> Path:
        root: Path = getattr(places, self.root)
        return root / self.name


@dataclass(frozen=True)
class Places:
    """The two folders that Bakehouse writes to: `cache` can be made again, `state` cannot."""

    cache: Path
    state: Path

    git = _Below("cache", "git")
    """One bare mirror a repository."""
    downloads = _Below("cache", "downloads")
    """Archives and wheels, by sha256."""
    builds = _Below("cache", "builds")
    """Artifacts, by digest."""
    weights = _Below("cache", "weights")
    """Weight files, by sha256 of the pin that names them."""
    toolkits = _Below("cache", "toolkits")
    """CUDA toolkits that Bakehouse provides."""
    compiler_cache = _Below("cache", "ccache")
    """Folder of ccache."""
    images = _Below("cache", "images")
    """Capabilities of container images, by digest; the engine keeps the images."""
    runs = _Below("state", "runs")
    """One folder a run, with its record and logs."""
    servers = _Below("state", "servers")
    """One folder a running (or just ended) server."""
    index = _Below("state", "index.sqlite")
    """SQLite index over all records."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> Places:
        """XDG folders, or below `BAKEHOUSE_HOME`. Raises HostError without a home folder."""
        env = os.environ if env is None else env
        try:
            if home := env.get("BAKEHOUSE_HOME"):
                root = Path(home).expanduser().absolute()
                return cls(root / "cache", root / "state")
            cache = Path(env.get("XDG_CACHE_HOME") or _user(env) / ".cache")
            state = Path(env.get("XDG_STATE_HOME") or _user(env) / ".local" / "state")
            return cls(cache.absolute() / "bakehouse", state.absolute() / "bakehouse")
        except RuntimeError as error:
            raise HostError(
                "no home folder found",
                where="HOME is not set, and the user has no entry in the password file",
                hint="set BAKEHOUSE_HOME to a writable folder",
                id="no-home",
            ) from error


def _user(env: Mapping[str, str]) -> Path:
    return Path(env.get("HOME") or Path.home())


_CHECKOUT = Path(__file__).resolve().parents[1]
_INSTALLED = Path(__file__).resolve().parent / "shipped"


def shipped(name: str) -> Path:
    """Return a folder that ships with Bakehouse: `recipes`, `patches` or `docker`.

    They lie beside the package in a checkout, and inside it (by setup.py) once it is installed.
    """
    in_checkout = (_CHECKOUT / "pyproject.toml").is_file()
    return (_CHECKOUT if in_checkout else _INSTALLED) / name


def user_config(env: Mapping[str, str] | None = None) -> Path:
    """Return the user's configuration folder. Raises RuntimeError if there is no home folder."""
    env = os.environ if env is None else env
    root = env.get("XDG_CONFIG_HOME") or _user(env) / ".config"
    return Path(root).absolute() / "bakehouse"


def writable_copy(path: Path) -> Path:
    """Return where to write a lock or golden value, given its path beside the recipe.

    That is the same path, unless it lies in an installed package: then it is in `shipped` of the
    user's configuration folder.
    """
    if not path.absolute().is_relative_to(_INSTALLED):
        return path
    return user_config() / "shipped" / path.absolute().relative_to(_INSTALLED)


def current_copy(path: Path) -> Path:
    """Return where to read a lock or golden value: the user's copy if there is one, else `path`."""
    copy = writable_copy(path)
    return copy if copy.exists() else path


def recipes_folder(given: Path | str | None = None, checkout: Path | None = None) -> Path:
    """Return the folder in which `--recipe NAME` is looked up.

    In this order: `given`, BAKEHOUSE_RECIPES, the folder of the checkout in which Invoke found its
    tasks, `./recipes`, `recipes` in the user's configuration folder, and what ships.
    """
    if given or (given := os.environ.get("BAKEHOUSE_RECIPES")):
        return Path(given).expanduser()
    if checkout:
        return checkout
    try:
        folders = [Path("recipes"), user_config() / "recipes"]
    except RuntimeError:
        folders = [Path("recipes")]
    return next((folder for folder in folders if folder.is_dir()), shipped("recipes"))
