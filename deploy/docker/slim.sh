#!/bin/sh
# Takes out of /opt/tidemill what a service never reads: installers, tests, debug symbols, a second build of zstandard.
set -eu
/opt/tidemill/bin/python -m pip uninstall -y --quiet setuptools pip
find /opt/tidemill \( -type d -name tests -o -path '*/zstandard/_cffi*' \) -prune -exec rm -r {} +
# Libraries that came inside a wheel have been patched, and strip may break those.
find /opt/tidemill -name '*.so' -not -path '*.libs/*' -exec strip --strip-debug {} +
