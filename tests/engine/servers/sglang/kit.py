"""SGLang engines before scripted servers, in virtual time."""

from __future__ import annotations

from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.sglang.dialect import SGLangDialect
from tests.engine.servers.kit import Kit
from tests.engine.servers.sglang.scripted import ScriptedSGLang

Server = ScriptedSGLang
_kit = Kit(SGLangConfig, SGLangDialect)
settings, engine_over, make_engine, opened = _kit.settings, _kit.engine_over, _kit.make_engine, _kit.opened
