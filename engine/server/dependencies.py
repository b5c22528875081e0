"""What routes are given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request

from ..async_llm import AsyncLLM
from .config import ServerConfig
from .delivery import Deliveries, Delivery
from .metrics import Metrics
from .tokenizer import Tokenizer


def _engine(request: Request) -> AsyncLLM:
    return request.app.state.llm


def _tokenizer(request: Request) -> Tokenizer:
    return request.app.state.tokenizer


def _config(request: Request) -> ServerConfig:
    return request.app.state.config


def _metrics(request: Request) -> Metrics:
    return request.app.state.metrics


def _deliveries(request: Request) -> Deliveries:
    return request.app.state.deliveries


async def _delivery(request: Request) -> AsyncIterator[Delivery]:
    async with _deliveries(request).open(request) as delivery:
        yield delivery


Engine = Annotated[AsyncLLM, Depends(_engine)]
Text = Annotated[Tokenizer, Depends(_tokenizer)]
Config = Annotated[ServerConfig, Depends(_config)]
Meter = Annotated[Metrics, Depends(_metrics)]
Handed = Annotated[Deliveries, Depends(_deliveries)]
Handing = Annotated[Delivery, Depends(_delivery)]
"""Ends when the answer is written."""
