// di-hold: keeps one file descriptor for a daemon that may be killed.
//
// A di-kvd host starts one and gives it the memory of its arena; the next start of that di-kvd asks for it
// back.  It maps nothing, reads nothing and writes nothing but its pid file: it has no fault of its own
// to die of.  It ends when it is told to, or when nobody has been connected for a while.
// See di-hold(8).
#include <getopt.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "holder.h"

namespace {

constexpr int exit_usage = 64;

constexpr std::string_view help =
    "usage: di-hold -i INSTANCE -r RUNDIR -l FD [-t SECONDS]\n"
    "keeps one file descriptor for a daemon that may be killed\n"
    "\n"
    "  -i INSTANCE  the daemon, \"di-kvd.host0\"\n"
    "  -r RUNDIR    its run directory\n"
    "  -l FD        listening socket, bound to RUNDIR/di-hold.NAME.sock\n"
    "  -t SECONDS   end when nobody has been connected for so long (600)\n"
    "  -h           this text\n"
    "  -V           the version\n";

[[noreturn]] void usage(const char* what) {
  std::fprintf(stderr, "di-hold: %s (di-hold -h explains)\n", what);
  std::exit(exit_usage);
}

int number_of(std::string_view text, const char* what) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 0) usage(what);
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  di::hold::Options options;
  const option longs[] = {{"help", no_argument, nullptr, 'h'}, {"version", no_argument, nullptr, 'V'}, {}};
  for (int flag = 0; (flag = ::getopt_long(argc, argv, "i:r:l:t:hV", longs, nullptr)) != -1;) {
    switch (flag) {
      case 'i':
        options.instance = optarg;
        break;
      case 'r':
        options.run_dir = optarg;
        break;
      case 'l':
        options.listen_fd = number_of(optarg, "-l wants a descriptor");
        break;
      case 't':
        options.alone = di::seconds(number_of(optarg, "-t wants seconds"));
        break;
      case 'h':
        std::fwrite(help.data(), 1, help.size(), stdout);
        return 0;
      case 'V':
        std::printf("di-hold %s\n", DI_VERSION);
        return 0;
      default:
        usage("unknown option");
    }
  }
  if (optind != argc) usage("too many arguments");
  if (!options.instance.starts_with("di-") || options.instance.find('.') == std::string::npos)
    usage("-i wants an instance");
  if (options.run_dir.empty()) usage("-r is missing");
  if (options.listen_fd < 0) usage("-l is missing");
  const di::Status status = di::hold::run(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "di-hold: %s\n", status.error().message.c_str());
  return 1;
}
