"""The rendezvous store: where it can be reached, and for how long."""

import psutil

from raytrain3d.parallel.groups import join_store, serve_store


def listening(port: int) -> list[str]:
    return [link.laddr.ip for link in psutil.Process().net_connections()
            if link.status == psutil.CONN_LISTEN and link.laddr.port == port]


def test_store_listens_at_its_address_alone_and_goes_with_the_object() -> None:
    store = serve_store("127.0.0.1")
    port = store.port
    assert listening(port) == ["127.0.0.1"]
    join_store("127.0.0.1", port, 10).set("key", "value")
    assert store.get("key") == b"value"
    del store
    assert listening(port) == []
