#include "fleet.h"

#include <cstdint>
#include <cstdio>
#include <set>
#include <vector>

#include "config/toml.h"
#include "daemon/exit.h"
#include "http/client.h"

namespace di::ctl {

namespace {

constexpr std::size_t instances_max = 4096;
constexpr Duration probe_limit = seconds(5);

struct Instance {
  std::string program;
  std::string name;
  std::string config;
  std::vector<std::string> overrides;
  std::vector<std::string> exec;
};

struct Fleet {
  std::vector<Instance> instances;
};

void bind_instance(config::Params& p, Instance& i) {
  p.string("program", i.program, {.required = true, .bytes_max = 32, .help = "di-kvd"});
  p.string("name", i.name, {.def = "0", .bytes_max = 32, .help = "the instance is PROGRAM.NAME"});
  p.string("config", i.config,
           {.path = true, .help = "its configuration; default PROGRAM.toml beside this file"});
  p.list("overrides", i.overrides, {.help = "key=value, as -o has them"});
  p.list("exec", i.exec,
         {.help = "words in front of the command, as in [\"ip\", \"netns\", \"exec\", \"b\"]"});
}

void bind_fleet(config::Params& p, Fleet& f) {
  p.tables("instance", f.instances, bind_instance, {.max = instances_max, .help = "one for each process"});
}

// Lines are how the shell tells values apart.
bool is_one_line(const std::string& text) {
  return text.find_first_of("\n\t") == std::string::npos;
}

}  // namespace

int print_fleet(const std::string& folder) {
  Fleet fleet;
  config::Params params;
  bind_fleet(params, fleet);
  const std::string path = folder + "/fleet.toml";
  std::vector<std::string> errors = config::parse_file(params, path);
  if (errors.empty() && fleet.instances.empty()) errors.push_back(path + ": no [[instance]]");
  std::set<std::string> names;
  std::string text;
  for (const Instance& instance : fleet.instances) {
    const std::string name = instance.program + "." + instance.name;
    if (!names.insert(name).second) errors.push_back(path + ": two instances are called " + name);
    const std::string config =
        instance.config.empty() ? folder + "/" + instance.program + ".toml" : instance.config;
    text += "instance\t" + name + "\nprogram\t" + instance.program + "\nconfig\t" + config + "\n";
    bool one_line = is_one_line(name) && is_one_line(config);
    for (const std::string& assignment : instance.overrides) {
      text += "override\t" + assignment + "\n";
      one_line = one_line && is_one_line(assignment);
    }
    for (const std::string& word : instance.exec) {
      text += "exec\t" + word + "\n";
      one_line = one_line && is_one_line(word);
    }
    text += "end\t\n";
    if (!one_line) errors.push_back(path + ": a tab or line end in a value of " + name);
  }
  if (!errors.empty()) {
    for (const std::string& error : errors) std::fprintf(stderr, "di-ctl: %s\n", error.c_str());
    return daemon::exit_config;
  }
  std::fputs(text.c_str(), stdout);
  return daemon::exit_ok;
}

std::vector<std::string> fleet_instances(const std::string& folder) {
  Fleet fleet;
  config::Params params;
  bind_fleet(params, fleet);
  std::vector<std::string> names;
  if (!config::parse_file(params, folder + "/fleet.toml").empty()) return names;
  for (const Instance& instance : fleet.instances) names.push_back(instance.program + "." + instance.name);
  return names;
}

int probe_ready(const std::string& address) {
  Result<http::Client> client = http::Client::connect(address, probe_limit);
  if (!client) return daemon::exit_failure;
  const Result<http::ClientReply> reply = client->get("/health/ready");
  return reply.ok() && reply->status == 200 ? daemon::exit_ok : daemon::exit_failure;
}

}  // namespace di::ctl
