#include "daemon/flags.h"

#include <fcntl.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace di::daemon {

namespace {

// No config file of the library's own, no environment, nothing abbreviated.
void parse_or_exit(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    std::exit(exit_ok);
  } catch (const CLI::CallForVersion& version) {
    std::fprintf(stdout, "%s\n", version.what());
    std::exit(exit_ok);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "%s: %s\n", app.get_name().c_str(), error.what());
    std::exit(exit_usage);
  }
}

// Empty: it is one.  Found now, not when nobody is told that the daemon serves.
std::string open_descriptor(const std::string& text) {
  int fd = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), fd);
  const bool number = error == std::errc() && end == text.data() + text.size() && fd >= 0;
  if (number && ::fcntl(fd, F_GETFD) != -1) return {};
  return text + (number ? " is not open" : " is no descriptor");
}

std::string version_line(std::string_view program) {
  return std::string(program) + " " DI_VERSION;
}

}  // namespace

bool parse_flags(Startup& startup, int argc, char** argv) {
  const std::string program(startup.about.program);
  CLI::App app(program + " " + std::string(startup.about.summary), program);
  app.set_help_flag("-h,--help", "print this and exit");
  app.set_version_flag("-V,--version", version_line(program), "print the version and exit");
  bool check_only = false;
  app.add_option("-f", startup.file,
                 "configuration file (default /etc/di/" + program + ".toml when it exists)")
      ->type_name("FILE");
  app.add_flag("-n", check_only, "check the configuration and exit; with -v print it, with -vv explain it");
  app.add_flag("-v", startup.verbose, "say more");
  app.add_option("-o", startup.overrides, "set a parameter, after the file")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false);
  app.add_option("--ready-fd", startup.ready_fd, "write a byte to this descriptor when the daemon serves")
      ->type_name("N")
      ->check(open_descriptor);
  parse_or_exit(app, argc, argv);
  if (startup.file.empty()) {
    const std::string standard = "/etc/di/" + program + ".toml";
    if (::access(standard.c_str(), F_OK) == 0) startup.file = standard;
  }
  return check_only;
}

std::string find_run_dir(const std::string& system, const std::string& local) {
  const auto has_instance = [](const std::string& folder, std::error_code& error) {
    std::filesystem::directory_iterator entries(folder, error);
    if (error) return false;
    return std::any_of(begin(entries), end(entries), [](const std::filesystem::directory_entry& entry) {
      const std::string name = entry.path().filename().string();
      return name.starts_with("di-") && name.ends_with(".ro");
    });
  };
  std::error_code error;
  if (has_instance(system, error)) return system;
  if (error == std::errc::no_such_file_or_directory) return local;
  if (error) return system;  // not for our eyes: the command says so
  return has_instance(local, error) ? local : system;
}

ControlFlags parse_control_flags(int argc, char** argv, const std::string& epilog) {
  ControlFlags flags;
  CLI::App app("di-ctl asks and steers the daemons of a fleet", "di-ctl");
  app.set_help_flag("-h,--help", "print this and exit");
  app.set_version_flag("-V,--version", version_line("di-ctl"), "print the version and exit");
  app.add_option("-r", flags.run_dir,
                 "run directory of the fleet (default /run/di; run if that has a fleet and /run/di none)")
      ->type_name("RUNDIR");
  app.add_option("-d", flags.instance, "only this instance (default: all)")->type_name("INSTANCE");
  app.add_flag("-a,--all", flags.all_columns, "all columns in text, where a command shows a choice");
  app.add_flag("-j", flags.json, "JSON lines instead of text");
  app.add_option("-m", flags.model, "chat: the model (default: the first that the service lists)")
      ->type_name("MODEL");
  app.add_option("-k", flags.key_file, "chat: file with the API key (default: RUNDIR/key, without -u)")
      ->type_name("KEYFILE");
  app.add_option("-u", flags.url, "chat: the service (default: the router of RUNDIR)")->type_name("URL");
  app.add_option("words", flags.words, "command")->type_name("WORD");
  app.positionals_at_end(false);
  app.prefix_command(false);
  app.footer(epilog);
  parse_or_exit(app, argc, argv);
  if (flags.run_dir.empty()) flags.run_dir = find_run_dir();
  return flags;
}

}  // namespace di::daemon
