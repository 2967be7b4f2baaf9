"""Speak to a worker with a certificate that has expired: `python -m tests.forge_cluster.expired HOST:PORT`."""

import asyncio
import datetime
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from forge_cluster.credentials import Credentials
from forge_cluster.machine import query_host
from tests.forge_cluster.machines import SECRET

with TemporaryDirectory() as folder:
    own = Credentials.make(SECRET, Path(folder), lifetime=-datetime.timedelta(hours=1))
    try:
        print(asyncio.run(query_host(sys.argv[1], own, do="describe")))
    except OSError as error:
        print(error)
