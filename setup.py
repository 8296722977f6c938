"""All metadata is in pyproject.toml; this file serves tools that still call setup.py."""

from setuptools import setup

setup()
