"""Gives Python 3.11 the one name of a later ``typing`` that the modules of Harbor which the tests import need."""

from __future__ import annotations

import typing

import typing_extensions

typing.__dict__.setdefault("override", typing_extensions.override)
