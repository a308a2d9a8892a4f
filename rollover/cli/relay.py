"""``rollover relay``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from rollover.cli import swarm_options
from rollover.errors import require
from rollover.privacy import Redactor


@click.command("relay", context_settings={"max_content_width": 100})
@swarm_options.join("The coordinator: wss://HOST:PORT.")
@click.option(
    "--listen",
    default="127.0.0.1:8795",
    show_default=True,
    metavar="HOST:PORT",
    help="Address on which workers fetch.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("relay"),
    show_default=True,
    metavar="DIR",
    help="Write nginx.conf to DIR; the cache and logs go there too.",
)
@swarm_options.token_file("Fetch with the token in FILE; when left out, each worker's own token is passed on.")
@click.option("--tls-certificate", type=swarm_options.FILE, metavar="FILE", help="The relay's certificate chain (PEM).")
@click.option("--tls-key", type=swarm_options.FILE, metavar="FILE", help="Its private key (PEM).")
@swarm_options.ca_file()
@click.option(
    "--trainer-name", metavar="NAME", help="A name in the coordinator's certificate, if URL has an IP address."
)
@click.option(
    "--max-cache-gb", type=float, default=50.0, show_default=True, help="Size of the blob cache in gigabytes."
)
@swarm_options.insecure("Allow plain connections, over a network that is itself private.")
@click.pass_context
def command(
    ctx: click.Context,
    url: str,
    listen: str,
    folder: Path,
    token_file: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    ca_file: Path | None,
    trainer_name: str | None,
    max_cache_gb: float,
    insecure: bool,
) -> None:
    """Write an nginx configuration that takes load off a swarm's trainer.

    The relay fetches each blob of the weights from the trainer once, however many workers ask for it, and keeps it.
    Workers either fetch from it because the run names it in engine.blob_urls, or join through it.

    \b
    rollover workers RUN --add relay --out relay.token
    rollover relay --join wss://trainer.example:8790 --token-file relay.token \\
        --listen 0.0.0.0:8795 --tls-certificate relay.pem --tls-key relay.key
    nginx -p relay -c nginx.conf
    """
    require("msgspec", "cryptography", purpose=ctx.command_path)
    from rollover.swarm.relay.folder import write_folder
    from rollover.swarm.relay.settings import RelaySettings
    from rollover.swarm.wire.address import CoordinatorAddress
    from rollover.swarm.wire.token import read_token

    token = None if token_file is None else read_token(token_file, {}).text
    (ctx.find_object(Redactor) or Redactor()).value(token, "token")
    settings = RelaySettings(
        trainer=CoordinatorAddress.parse(url, insecure=insecure),
        listen=listen,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        ca_file=ca_file,
        trainer_name=trainer_name,
        token=token,
        max_cache_gb=max_cache_gb,
        insecure=insecure,
    )
    file = write_folder(settings, folder)
    start = f"nginx -p {shlex.quote(str(folder))} -c nginx.conf"
    click.echo(f"Wrote {file}. Start the relay, and stop it with Ctrl-C:\n\n  {start}\n")
    if os.geteuid() == 0:
        click.echo(
            f"Started by root, it runs as the user nobody, who must be able to reach {folder.absolute()}: it is"
            " better to start it as another user.\n"
        )
    if token is not None:
        click.echo(f"Workers fetch from it when the run names it:\n\n{_named(settings.url)}")
    else:
        scheme = "ws" if tls_certificate is None else "wss"
        click.echo(
            "Workers join through it:\n\n"
            f"  rollover worker --join {scheme}://{settings.reached} ...\n\n"
            "To serve workers that join elsewhere, it needs a token of its own (--token-file)."
        )


def _named(url: str) -> str:
    return f"  rollover train ... --engine.blob_urls '[\"{url}\"]'"
