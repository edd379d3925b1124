#!/usr/bin/env bash
# Checks everything in this directory against the real thing: promtool on configurations, rules and metrics; a Prometheus that
# scrapes running jobs, through the driver's endpoint and through Ray, and must get data for every expression; the dashboards
# against Grafana's own types; pictures of reports and dashboards in a headless browser. Installs what is missing (Debian).
#   dashboards/check.sh [more arguments for pytest]
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()
command -v promtool >/dev/null || missing+=(prometheus)
command -v chromium >/dev/null || missing+=(chromium)
command -v npm >/dev/null || missing+=(nodejs npm)
if ((${#missing[@]})); then
  apt-get update -q
  apt-get install -y -q --no-install-recommends "${missing[@]}"
fi
exec "${PYTHON:-python}" -m pytest -m "slow or not slow" tests/monitoring "$@"
