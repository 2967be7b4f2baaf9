"""Speak to a worker with a certificate that has expired: `python -m tests.runtime.cluster.expired HOST:PORT`."""

import asyncio
import datetime
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from forge.runtime.cluster.credentials import Credentials
from forge.runtime.cluster.machine import describe
from tests.runtime.cluster.machines import SECRET

with TemporaryDirectory() as folder:
    own = Credentials.make(SECRET, Path(folder), lifetime=-datetime.timedelta(hours=1))
    try:
        print(asyncio.run(describe(sys.argv[1], own)))
    except OSError as error:
        print(error)
