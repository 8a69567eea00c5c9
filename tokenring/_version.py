"""The version, in one place: pyproject.toml reads it from here, and CHANGELOG.md must agree with it."""

__version__ = "0.1.0"
