"""SGLang engines before scripted servers, in virtual time."""

from __future__ import annotations

from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.sglang.dialect import SGLangDialect
from tests.engine.servers.kit import Kit
from tests.engine.servers.sglang.scripted import ScriptedSGLang

Server = ScriptedSGLang
_kit = Kit(SGLangConfig, SGLangDialect, ScriptedSGLang)
settings, engine_over, make_engine = _kit.settings, _kit.engine_over, _kit.make_engine
opened, serving, refused = _kit.opened, _kit.serving, _kit.refused
