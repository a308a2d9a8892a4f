"""Both transports keep the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.transports.base import Sessions
from rollover.swarm.coordinator.transports.gateway import Gateway
from rollover.swarm.coordinator.transports.nats.cluster import NatsCluster
from rollover.swarm.coordinator.transports.nats.gateway import NatsGateway
from rollover.swarm.coordinator.trust.credentials import Credentials
from rollover.swarm.nats.address import NatsAddress
from rollover.swarm.wire.address import CoordinatorAddress
from tests.swarm.nats_kit import NatsServer, needs_server, running
from tests.swarm.transport_contract import Place, TransportContract


class TestWebSocket(TransportContract):
    @asynccontextmanager
    async def place(self, sessions: Sessions, credentials: Credentials) -> AsyncIterator[Place]:
        config = SwarmConfig(listen="127.0.0.1:0")
        gateway = Gateway(config, sessions, member_of=credentials.member_of, blobs=self.tmp_path)
        gateway.bind()
        await gateway.serve()
        try:
            yield Place(gateway, CoordinatorAddress.parse(gateway.url), credentials)
        finally:
            await gateway.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    made = NatsServer(tmp_path_factory.mktemp("nats"))
    with running(made):
        yield made


@needs_server
class TestNats(TransportContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: NatsServer) -> None:
        self.server = server

    @asynccontextmanager
    async def place(self, sessions: Sessions, credentials: Credentials) -> AsyncIterator[Place]:
        address = NatsAddress.parse(f"{self.server.url}/runs.one")
        cluster = NatsCluster(address)
        await cluster.open()
        gateway = NatsGateway(cluster, sessions, hashes=credentials.hashes)
        await gateway.serve()
        try:
            yield Place(gateway, address, credentials)
        finally:
            await gateway.close()
