"""Environments of episodes, which answer a model's turns. A kind is one file and one row of ``EnvironmentConfig``."""

from __future__ import annotations

from rollover.environments.episodes.agent import AgentConfig
from rollover.environments.episodes.base import EnvironmentSettings
from rollover.environments.episodes.instances import ClassConfig
from rollover.environments.episodes.tools import ToolsConfig

EnvironmentConfig = ToolsConfig | ClassConfig | AgentConfig
"""Distinguished by ``kind``."""

__all__ = ["AgentConfig", "ClassConfig", "EnvironmentConfig", "EnvironmentSettings", "ToolsConfig"]
