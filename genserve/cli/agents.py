"""Agents: coding agents, and the settings with which each of them uses a server.

An agent gets its settings by flags, by environment variables, and by files of ours that these name: the
user's own configuration stays as it is. `make conformance` runs the agents with these settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# The value of a variable that has the server's key: any text where the server needs none.
KEY = "${GENSERVE_API_KEY:-none}"
PROVIDER = "genserve"
# A processor may take minutes to read a prompt, and agents give up on a silent server after some minutes.
_TIMEOUT_MS = 3_600_000
# Claude Code compacts a conversation that comes within an answer and 13,000 tokens of the context. Its first
# prompt has 13,000, which is beyond that in a context of 24,000. So we name a longer one: it compacts within
# an answer and 2,000 tokens, or when the server says that a prompt is too long.
_CLAUDE_RESERVED_TOKENS = 11_000
# An agent asks for at most this many tokens in an answer, and leaves as many free below the context length.
_MAX_ANSWER_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentModel:
    """The model of a server that an agent is to use."""

    url: str            # the URL of the server, without a path
    name: str
    max_length: int     # the context length in tokens

    @property
    def max_answer_tokens(self) -> int:
        """The longest answer to ask for: at most an eighth of the context."""
        return min(_MAX_ANSWER_TOKENS, self.max_length // 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What an agent is started with."""

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)     # what to write before


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A coding agent."""

    title: str
    program: str
    package: str    # on npm
    dialect: str
    settings: Callable[[AgentModel, Path], AgentSettings]   # the path: a folder for its files


def _codex(model: AgentModel, _folder: Path) -> AgentSettings:
    provider = {
        "name": PROVIDER,
        "base_url": f"{model.url}/v1",
        "env_key": "GENSERVE_API_KEY",
        "wire_api": "responses",
        "stream_idle_timeout_ms": _TIMEOUT_MS,
    }
    values = {
        "model": model.name,
        "model_provider": PROVIDER,
        **{f"model_providers.{PROVIDER}.{name}": value for name, value in provider.items()},
        "model_context_window": model.max_length,
        "web_search": "disabled",   # OpenAI's servers run it
    }
    # A value is TOML, in which a number and a text in double quotes look as in JSON.
    words = (word for name, value in values.items() for word in ("-c", f"{name}={json.dumps(value)}"))
    return AgentSettings(arguments=tuple(words), variables={"GENSERVE_API_KEY": KEY})


def _claude(model: AgentModel, _folder: Path) -> AgentSettings:
    return AgentSettings(
        arguments=("--disallowedTools=WebSearch",),     # Anthropic's servers run it
        variables={
            "ANTHROPIC_BASE_URL": model.url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_API_KEY": "",    # the user's own key is for Anthropic
            "ANTHROPIC_MODEL": model.name,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": model.name,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": model.name,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": model.name,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(model.max_length + _CLAUDE_RESERVED_TOKENS),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(model.max_answer_tokens),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": str(_TIMEOUT_MS),
        },
    )


def _opencode(model: AgentModel, _folder: Path) -> AgentSettings:
    config = {
        "model": f"{PROVIDER}/{model.name}",
        "small_model": f"{PROVIDER}/{model.name}",
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "options": {
                    "baseURL": f"{model.url}/v1",
                    "apiKey": "{env:GENSERVE_API_KEY}",
                    "timeout": False,
                },
                "models": {
                    model.name: {"limit": {"context": model.max_length, "output": model.max_answer_tokens}}
                },
            }
        },
    }
    variables = {"GENSERVE_API_KEY": KEY, "OPENCODE_CONFIG_CONTENT": json.dumps(config)}
    return AgentSettings(variables=variables)


def _qwen(model: AgentModel, folder: Path) -> AgentSettings:
    generation = {
        "contextWindowSize": model.max_length,
        "samplingParams": {"max_tokens": model.max_answer_tokens},
        "timeout": _TIMEOUT_MS,
        "streamIdleTimeoutMs": _TIMEOUT_MS,
    }
    defaults = folder / "qwen-defaults.json"
    return AgentSettings(
        arguments=("--auth-type=openai",),
        variables={
            "OPENAI_BASE_URL": f"{model.url}/v1",
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": model.name,
            "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(defaults),
            "QWEN_STREAM_MAX_LIFETIME_MS": str(_TIMEOUT_MS),
        },
        files={defaults: json.dumps({"model": {"generationConfig": generation}}, indent=2)},
    )


def _copilot(model: AgentModel, _folder: Path) -> AgentSettings:
    return AgentSettings(
        variables={
            "COPILOT_PROVIDER_BASE_URL": f"{model.url}/v1",
            "COPILOT_PROVIDER_API_KEY": KEY,
            "COPILOT_MODEL": model.name,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(model.max_length - model.max_answer_tokens),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(model.max_answer_tokens),
            "COPILOT_OFFLINE": "true",
        },
    )


def _pi(model: AgentModel, folder: Path) -> AgentSettings:
    provider = {
        "baseUrl": f"{model.url}/v1",
        "apiKey": "$GENSERVE_API_KEY",
        "api": "openai-completions",
        "models": [
            {
                "id": model.name,
                "name": model.name,
                "reasoning": False,
                "input": ["text"],
                "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                "contextWindow": model.max_length,
                "maxTokens": model.max_answer_tokens,
            }
        ],
    }
    # pi compacts when less than the first is left, and keeps the second; its own are 16,384 and 20,000.
    quarter = model.max_length // 4
    compaction = {"reserveTokens": min(16_384, quarter), "keepRecentTokens": min(20_000, quarter)}
    settings = {"compaction": compaction, "httpIdleTimeoutMs": _TIMEOUT_MS}
    # No flag of pi takes settings, but a variable names the folder of all of them.
    agent = folder / "pi"
    return AgentSettings(
        arguments=("--model", f"{PROVIDER}/{model.name}"),
        variables={"GENSERVE_API_KEY": KEY, "PI_CODING_AGENT_DIR": str(agent)},
        files={
            agent / "models.json": json.dumps({"providers": {PROVIDER: provider}}, indent=2),
            agent / "settings.json": json.dumps(settings, indent=2),
        },
    )


AGENTS = {
    "codex": Agent(
        title="Codex", program="codex", package="@openai/codex", dialect="Responses", settings=_codex
    ),
    "claude": Agent(
        title="Claude Code",
        program="claude",
        package="@anthropic-ai/claude-code",
        dialect="Messages",
        settings=_claude,
    ),
    "opencode": Agent(
        title="opencode", program="opencode", package="opencode-ai", dialect="chat", settings=_opencode
    ),
    "qwen": Agent(
        title="Qwen Code", program="qwen", package="@qwen-code/qwen-code", dialect="chat", settings=_qwen
    ),
    "copilot": Agent(
        title="Copilot CLI", program="copilot", package="@github/copilot", dialect="chat", settings=_copilot
    ),
    "pi": Agent(
        title="pi", program="pi", package="@earendil-works/pi-coding-agent", dialect="chat", settings=_pi
    ),
}
