"""Filters that a route turns on for its own requests: faults on purpose, and what browsers of other origins may do.

The listener has both disabled; a route that configures one turns it on. Authored with the typed library, whose slowness
does not matter here: equal configurations are made once.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Final

import betterproto2
from envoy_data_plane.envoy.extensions.filters.common.fault.v3 import FaultDelay
from envoy_data_plane.envoy.extensions.filters.http.cors.v3 import Cors as CorsFilter
from envoy_data_plane.envoy.extensions.filters.http.cors.v3 import CorsPolicy
from envoy_data_plane.envoy.extensions.filters.http.fault.v3 import FaultAbort, HttpFault
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher
from envoy_data_plane.envoy.type.v3 import FractionalPercent, FractionalPercentDenominatorType
from envoy_data_plane.google.protobuf import Any
from google.protobuf.any_pb2 import Any as AnyMessage

from controlplane.compile import authored
from controlplane.model import Cors, Fault, TextMatch

__all__ = ["CORS", "FAULT", "cors_config", "fault_config", "route_filters"]

CORS: Final = "envoy.filters.http.cors"
FAULT: Final = "envoy.filters.http.fault"


def route_filters() -> list[HttpFilter]:
    """Return the filters as the listener has them, in the order in which requests pass them."""
    return [
        authored.http_filter(CORS, CorsFilter(), disabled=True),
        authored.http_filter(FAULT, HttpFault(), disabled=True),
    ]


@functools.lru_cache(maxsize=1024)
def fault_config(fault: Fault) -> AnyMessage:
    """Return what a route says to the fault filter."""
    config = HttpFault()
    if fault.delay_millionths:
        delay = timedelta(milliseconds=fault.delay_ms)
        config.delay = FaultDelay(fixed_delay=delay, percentage=_share(fault.delay_millionths))
    if fault.abort_millionths:
        share = _share(fault.abort_millionths)
        if fault.abort_grpc is not None:
            config.abort = FaultAbort(grpc_status=fault.abort_grpc, percentage=share)
        else:
            config.abort = FaultAbort(http_status=fault.abort_status, percentage=share)
    return _packed(config)


@functools.lru_cache(maxsize=1024)
def cors_config(cors: Cors) -> AnyMessage:
    """Return what a route says to the filter that answers browsers."""
    return _packed(
        CorsPolicy(
            allow_origin_string_match=[_text(origin) for origin in cors.origins],
            allow_methods=",".join(cors.methods),
            allow_headers=",".join(cors.headers),
            expose_headers=",".join(cors.expose),
            max_age="" if cors.max_age_s is None else str(cors.max_age_s),
            allow_credentials=cors.credentials,
            forward_not_matching_preflights=cors.forward_unmatched,
        )
    )


def _share(millionths: int) -> FractionalPercent:
    return FractionalPercent(numerator=millionths, denominator=FractionalPercentDenominatorType.MILLION)


def _text(text: TextMatch) -> StringMatcher:
    if text.regex:
        return StringMatcher(safe_regex=RegexMatcher(regex=text.text))
    return StringMatcher(prefix=text.text) if text.prefix else StringMatcher(exact=text.text)


def _packed(message: betterproto2.Message) -> AnyMessage:
    return AnyMessage.FromString(bytes(Any.pack(message)))
