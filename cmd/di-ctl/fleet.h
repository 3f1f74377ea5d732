// cmd/di-ctl/fleet.h: what scripts/di-up asks di-ctl for, because a shell reads neither TOML nor HTTP.
#pragma once

#include <string>
#include <vector>

namespace di::ctl {

// Prints CONFDIR/fleet.toml for the shell: for each instance the lines `instance`, `program`,
// `config`, any number of `override` and `exec`, then `end`; word and value separated by a tab.
// Returns an exit status.
int print_fleet(const std::string& folder);

// The names of its instances; none when it cannot be read.
[[nodiscard]] std::vector<std::string> fleet_instances(const std::string& folder);

// 0 when the router at HOST:PORT answers 200 to /health/ready.
int probe_ready(const std::string& address);

}  // namespace di::ctl
