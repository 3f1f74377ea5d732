#include "commands.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

#include "chat.h"
#include "daemon/control.h"
#include "daemon/exit.h"
#include "fleet.h"
#include "keygen.h"
#include "output.h"

namespace di::ctl {

namespace {

// What is asked is at hand; what is steered may have to wait for streams to end.
constexpr Duration show_silence_max = seconds(15);
constexpr Duration act_silence_max = std::chrono::minutes(10);

// Of a row per place: what it is, how it is and how full.  In this form $3 is the tier and $8 the bytes of a
// row of di-meta.
constexpr std::string_view kv_columns =
    "place tier state complete pages blocks bytes bytes_total used_bytes payload_bytes slots capacity_bytes";

// What a volume is, how it is and how full; the error has blanks.
constexpr std::string_view volume_columns =
    "place volume path state reason columns used_bytes capacity_bytes error";
constexpr std::string_view a_store = "a di-kvd store";
constexpr std::string_view a_rank = "di-prefill and di-decode";

constexpr Command table[] = {
    {"show fleet", "", Scope::each, "instances, as di-meta knows them", "di-meta"},
    {"show status", "", Scope::each, "each instance by itself"},
    {"show peers", "", Scope::each, "who is connected to whom"},
    {"show requests", "", Scope::each, "requests in flight", "di-router"},
    {"show ranks", "", Scope::each, "ranks with their credit and load", "di-router"},
    {"show kv", "[pages|holders]", Scope::each, "what the cache holds, by place; -a: every figure", "",
     kv_columns},
    {"show volumes", "", Scope::each, "the volumes of the stores; -a: every figure", "", volume_columns},
    {"show missratio", "", Scope::each, "what share of blocks a cache of other sizes would miss", "di-meta"},
    {"show tenants", "", Scope::each, "what each tenant has in the store, and its quota", "di-meta"},
    {"show config", "", Scope::each, "parameters and their values"},
    {"show metrics", "", Scope::each, "every counter, gauge and histogram"},
    {"show gauges", "", Scope::each, "things acquired and not yet given back"},
    {"show faults", "", Scope::each, "fault points, their hits and what is armed"},
    {"explain", "ID", Scope::first, "the life of one request"},
    {"drain", "INSTANCE", Scope::named, "take no new work, finish what runs", a_rank},
    {"resume", "INSTANCE", Scope::named, "take work again", a_rank},
    {"kv fsck", "STORE", Scope::named, "look at every slot of a store and count", a_store},
    {"kv scrub", "STORE", Scope::named, "read a store now and compare every byte; a row each second",
     a_store},
    {"kv volume return", "VOLUME STORE", Scope::named,
     "open a volume again whose disk was mended, by its number", a_store},
    {"kv du", "", Scope::each, "bytes in the store by layout and geometry", "di-meta"},
    {"kv repair", "[now]", Scope::each, "stripes that wait for repair; now: without further pause",
     "di-meta"},
    {"kv drain", "[STORE] [off]", Scope::each, "empty a store node for good; what is left on it", "di-meta"},
    {"kv rebalance", "", Scope::each, "make the placements of new stripes anew", "di-meta"},
    {"kv drop", "STRIPE", Scope::each, "take a stripe out of the cache", "di-meta"},
    {"kv drop store", "STORE", Scope::each, "give up what a store had that is away and will not be back",
     "di-meta"},
    {"forget", "INSTANCE", Scope::each, "take one that is away off show fleet", "di-meta"},
    {"backup", "FILE", Scope::each, "copy the catalogue, while it is used", "di-meta"},
    {"kv drop arena", "HOST", Scope::named, "empty the arena of a host: cached pages that nobody holds",
     "a di-kvd host"},
    {"reload", "", Scope::each, "read the configuration again"},
    {"log", "LEVEL [MODULE]", Scope::each, "error, warn, info or debug; of one module or of all"},
    {"clock advance", "MS", Scope::each, "move product time (clock.manual) and run what becomes due"},
    {"keygen", "INSTANCE [FOLDER]", Scope::local, "make the keys of an instance; nothing needs to run"},
    {"keygen api", "[TENANT]", Scope::local, "make an API key, and print the row for di-router's file"},
    {"chat", "", Scope::local, "talk to the model (-m MODEL, -k KEYFILE, -u URL)"},
    {"fleet", "CONFDIR", Scope::local, ""},
    {"ready", "ADDRESS", Scope::local, ""},
};

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> words;
  while (!text.empty()) {
    const std::size_t blank = text.find(' ');
    words.emplace_back(text.substr(0, blank));
    if (blank == std::string_view::npos) break;
    text.remove_prefix(blank + 1);
  }
  return words;
}

std::string joined(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + word;
  return line;
}

int usage(const std::string& message) {
  std::fprintf(stderr, "di-ctl: %s (di-ctl -h lists the commands)\n", message.c_str());
  return daemon::exit_usage;
}

// Longer words are no slip of the hand, and are not compared.
constexpr std::size_t slip_bytes_max = 64;

// How many letters have to be put in, left out, changed or swapped with the next to make one of the other.
std::size_t edits_between(std::string_view a, std::string_view b) {
  if (std::max(a.size(), b.size()) > slip_bytes_max) return slip_bytes_max;
  std::vector<std::vector<std::size_t>> edits(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        edits[i][j] = i + j;
        continue;
      }
      edits[i][j] = std::min(
          {edits[i - 1][j] + 1, edits[i][j - 1] + 1, edits[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0U : 1U)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        edits[i][j] = std::min(edits[i][j], edits[i - 2][j - 2] + 1);
      }
    }
  }
  return edits[a.size()][b.size()];
}

// ": did you mean 'show requests'?", or nothing.
std::string near_miss(const std::vector<std::string>& words) {
  // Only its beginning was said.
  std::string begins;
  for (const Command& command : table) {
    if (!command.help.empty() && command.words.starts_with(joined(words) + " "))
      begins += (begins.empty() ? "" : ", ") + std::string(command.words);
  }
  if (!begins.empty()) return ": there are " + begins;
  constexpr std::size_t edits_max = 3;
  const Command* best = nullptr;
  std::size_t best_edits = edits_max + 1;
  for (const Command& command : table) {
    if (command.help.empty()) continue;
    const std::size_t count = std::min(words.size(), split(command.words).size());
    const std::vector<std::string> front(words.begin(), words.begin() + static_cast<std::ptrdiff_t>(count));
    const std::size_t d = edits_between(joined(front), command.words);
    if (d < best_edits && d < command.words.size() / 2) {
      best = &command;
      best_edits = d;
    }
  }
  return best == nullptr ? "" : ": did you mean '" + std::string(best->words) + "'?";
}

// What is said of `word` where one of `known` was wanted.
std::string wanted(const std::string& word, const std::vector<std::string>& known) {
  constexpr std::size_t edits_max = 2;
  std::string all;
  std::string nearest;
  std::size_t least = edits_max + 1;
  for (const std::string& name : known) {
    all += (all.empty() ? "" : ", ") + name;
    const bool last_word = name.ends_with("." + word);
    const std::size_t edits = last_word ? 0 : edits_between(word, name);
    if (edits >= least || edits >= name.size()) continue;
    least = edits;
    nearest = name;
  }
  return (nearest.empty() ? "there are " : "did you mean " + nearest + "? There are ") + all;
}

int nothing_to_show(const std::string& noun) {
  std::vector<std::string> nouns;
  for (const Command& command : table) {
    const std::vector<std::string> words = split(command.words);
    if (words.front() == "show") nouns.push_back(words[1]);
  }
  return usage("nothing to show is called '" + noun + "': " + wanted(noun, nouns));
}

// Writes short words out in full where only one command fits.
std::vector<std::string> expanded(std::vector<std::string> words) {
  for (std::size_t at = 0; at < words.size(); ++at) {
    std::vector<std::string> fits;
    for (const Command& command : table) {
      const std::vector<std::string> known = split(command.words);
      if (command.help.empty() || at >= known.size() || !known[at].starts_with(words[at])) continue;
      if (!std::equal(words.begin(), words.begin() + static_cast<std::ptrdiff_t>(at), known.begin()))
        continue;
      if (std::find(fits.begin(), fits.end(), known[at]) == fits.end()) fits.push_back(known[at]);
    }
    if (fits.size() != 1) break;
    words[at] = fits.front();
  }
  return words;
}

// The command whose words these begin with; the longest.
const Command* find(const std::vector<std::string>& words) {
  const Command* best = nullptr;
  std::size_t best_count = 0;
  for (const Command& command : table) {
    const std::vector<std::string> known = split(command.words);
    if (known.size() > words.size() || known.size() <= best_count) continue;
    if (!std::equal(known.begin(), known.end(), words.begin())) continue;
    best = &command;
    best_count = known.size();
  }
  return best;
}

bool arguments_fit(const Command& command, std::size_t count) {
  std::size_t needed = 0;
  std::size_t allowed = 0;
  for (const std::string& argument : split(command.arguments)) {
    ++allowed;
    if (!argument.starts_with("[")) ++needed;
  }
  return count >= needed && count <= allowed;
}

// Instances with a control socket, in the order they depend on each other, so that an advance of
// the clock reaches the servers before their callers.  `by`: of this program only, unless it is empty.  `why`: when the
// folder cannot be read.
std::vector<std::string> instances_in(const std::string& run_dir, std::string_view by = {},
                                      std::error_code* why = nullptr) {
  static constexpr std::string_view order[] = {"di-meta.",    "di-kvd.store", "di-kvd.",
                                               "di-prefill.", "di-decode.",   "di-router."};
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(run_dir, error)) {
    if (entry.path().extension() != ".ctl") continue;
    const std::string name = entry.path().stem().string();
    if (by.empty() || name.starts_with(std::string(by) + ".")) names.push_back(name);
  }
  if (why != nullptr) *why = error;
  const auto rank = [](const std::string& name) {
    std::size_t i = 0;
    while (i < std::size(order) && !name.starts_with(order[i])) ++i;
    return i;
  };
  std::sort(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return std::make_pair(rank(a), a) < std::make_pair(rank(b), b);
  });
  return names;
}

// What an instance that does not answer may be called instead: those of the fleet that scripts/di-up started
// here, and those with a socket.
std::vector<std::string> known_instances(const std::string& run_dir) {
  std::vector<std::string> names = instances_in(run_dir);
  std::string conf;
  if (std::ifstream file(run_dir + "/.up/conf"); std::getline(file, conf)) {
    for (std::string& name : fleet_instances(conf)) names.push_back(std::move(name));
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

class Session {
 public:
  Session(const daemon::ControlFlags& flags, Output& output) : flags_(flags), output_(output) {}

  Status ask(const std::string& instance, const std::vector<std::string>& words) {
    const bool shows = words.front() == "show" || words.front() == "explain";
    Result<daemon::ControlClient> client = connect(instance, shows);
    if (!client) {
      Error error = client.error();
      // A socket file that a killed process left behind.
      if (error.os_errno == ECONNREFUSED || error.code == Code::not_found) {
        error.code = Code::unreachable;
        const std::vector<std::string> known = known_instances(flags_.run_dir);
        const bool is_known = known.empty() || std::binary_search(known.begin(), known.end(), instance);
        error.message = is_known ? "not running" : "no such instance: " + wanted(instance, known);
      } else if (error.code == Code::unsupported) {
        error.code = Code::stale;  // of another protocol: it was not asked, and is not passed over
      }
      return error;
    }
    return client->request(
        words,
        [&](const wire::ctl_row& row) {
          ++rows_;
          output_.row(instance, row);
        },
        shows ? show_silence_max : act_silence_max);
  }

  [[nodiscard]] std::size_t rows() const { return rows_; }

 private:
  // On the socket that steers; whoever may not open it can still look on the other.
  [[nodiscard]] Result<daemon::ControlClient> connect(const std::string& instance, bool shows) const {
    const std::string path = flags_.run_dir + "/" + instance;
    Result<daemon::ControlClient> client = daemon::ControlClient::connect(path + ".ctl", "di-ctl");
    if (client || !shows || client.error().os_errno != EACCES) return client;
    Result<daemon::ControlClient> looks = daemon::ControlClient::connect(path + ".ro", "di-ctl");
    return looks ? std::move(looks) : std::move(client);
  }

  const daemon::ControlFlags& flags_;
  Output& output_;
  std::size_t rows_ = 0;
};

void complain(const std::string& instance, const Error& error) {
  std::fprintf(stderr, "di-ctl: %s: %s\n", instance.c_str(), error.message.c_str());
}

// Of one that was asked by name and does not know the command: who does, and what may have been meant.
void complain(const std::string& instance, const Error& error, const Command& command) {
  if (error.code != Code::unsupported || command.by.empty()) return complain(instance, error);
  std::string text = "'" + std::string(command.words) + "' is for " + std::string(command.by);
  for (const Command& other : table) {
    if (other.words.ends_with(" " + std::string(command.words)))
      text += "; there is '" + std::string(other.words) + "', too: " + std::string(other.help);
  }
  complain(instance, {error.code, 0, text});
}

// Asks all; the command succeeded when one answered and none failed in earnest.  `one`: those asked should
// know it.
int ask_each(Session& session, const std::vector<std::string>& instances,
             const std::vector<std::string>& words, bool one) {
  const bool shows = words.front() == "show";
  const Command* command = find(words);
  const bool listed = command != nullptr;  // else a newer daemon may know it, or nobody
  int answered = 0;
  int failed = 0;
  std::size_t passed_over = 0;
  std::set<std::string> complaints;  // what all say is said once
  for (const std::string& instance : instances) {
    const Status status = session.ask(instance, words);
    if (status.ok()) {
      ++answered;
      continue;
    }
    const Code code = status.error().code;
    if ((!one || !listed) && code == Code::unsupported) {
      ++passed_over;
      continue;
    }
    if (code != Code::invalid || complaints.insert(status.error().message).second) {
      listed ? complain(instance, status.error(), *command) : complain(instance, status.error());
    }
    // A dead instance has nothing to show, and that is no failure of the listing.
    if (one || !shows || code != Code::unreachable) ++failed;
  }
  if (answered == 0 && failed == 0 && passed_over > 0) {
    if (!listed) return nothing_to_show(words[1]);
    std::fprintf(stderr, "di-ctl: nobody answers '%s': no instance here knows it\n", joined(words).c_str());
  }
  return answered > 0 && failed == 0 ? daemon::exit_ok : daemon::exit_failure;
}

int ask_first(Session& session, const std::vector<std::string>& instances,
              const std::vector<std::string>& words) {
  Error last{Code::not_found, 0, "nobody answers"};
  std::string who = "fleet";
  for (const std::string& instance : instances) {
    const Status status = session.ask(instance, words);
    if (status.ok()) return daemon::exit_ok;
    if (status.error().code == Code::unsupported) continue;
    last = status.error();
    who = instance;
  }
  complain(who, last);
  return daemon::exit_failure;
}

}  // namespace

std::span<const Command> commands() {
  return table;
}

std::string command_list() {
  std::string text = "Commands:\n";
  for (const Command& command : table) {
    if (command.help.empty()) continue;
    std::string left = "  " + std::string(command.words);
    if (!command.arguments.empty()) left += " " + std::string(command.arguments);
    left.resize(std::max<std::size_t>(left.size() + 1, 26), ' ');
    text += left + std::string(command.help) + "\n";
  }
  return text;
}

int run(const daemon::ControlFlags& flags, bool interactive) {
  if (flags.words.empty()) return usage("no command");
  std::vector<std::string> words = interactive && !flags.json ? expanded(flags.words) : flags.words;
  const Command* command = find(words);
  // A daemon may list what this di-ctl has no row for.
  static constexpr Command listing{"show", "WHAT [MORE]", Scope::each, ""};
  if (command == nullptr && words.front() == "show") command = &listing;
  const std::string line = joined(words);
  if (command == nullptr) return usage("unknown command '" + line + "'" + near_miss(words));
  const std::size_t fixed = split(command->words).size();
  if (!arguments_fit(*command, words.size() - fixed)) {
    return usage("'" + line + "': want " + std::string(command->words) + " " +
                 std::string(command->arguments));
  }
  // Relative to where di-ctl is, not the daemon.
  if (words.front() == "backup") words[1] = std::filesystem::absolute(words[1]).string();
  const bool chats = words.front() == "chat";
  if (!chats && !(flags.model.empty() && flags.key_file.empty() && flags.url.empty())) {
    return usage("-m, -k and -u are for chat");
  }
  if (command->scope == Scope::local) {
    if (chats) return chat(flags);
    if (fixed == 2) return make_api_key(words.size() > 2 ? words[2] : "default");  // keygen api
    if (words.front() == "keygen") return make_keys(words[1], words.size() > 2 ? words[2] : ".");
    return words.front() == "fleet" ? print_fleet(words[1]) : probe_ready(words[1]);
  }

  const bool chosen = !flags.all_columns && !command->columns.empty() && words.size() == fixed;
  const std::unique_ptr<Output> output =
      flags.json ? make_json_output()
                 : make_text_output(chosen ? split(command->columns) : std::vector<std::string>{});
  Session session(flags, *output);
  if (command->scope == Scope::named) {
    const std::string& instance = words.back();
    const std::vector<std::string> request(words.begin(), words.end() - 1);
    const Status status = session.ask(instance, request);
    output->end();
    if (status.ok()) return daemon::exit_ok;
    complain(instance, status.error(), *command);
    return daemon::exit_failure;
  }
  std::error_code unread;
  const std::vector<std::string> instances = flags.instance.empty()
                                                 ? instances_in(flags.run_dir, command->by, &unread)
                                                 : std::vector<std::string>{flags.instance};
  if (instances.empty() && unread && unread != std::errc::no_such_file_or_directory) {
    std::fprintf(stderr, "di-ctl: cannot read %s: %s\n", flags.run_dir.c_str(), unread.message().c_str());
    return daemon::exit_failure;
  }
  if (instances.empty()) {
    if (command == &listing) return nothing_to_show(words[1]);
    if (!instances_in(flags.run_dir).empty()) {
      std::fprintf(stderr, "di-ctl: nobody answers '%s': only %s does, and none runs\n", line.c_str(),
                   std::string(command->by).c_str());
    } else {
      const bool here = flags.run_dir != "run" && !instances_in("run").empty();
      std::fprintf(stderr, "di-ctl: nothing runs in %s (%s)\n",
                   std::filesystem::absolute(flags.run_dir).c_str(),
                   here ? "a fleet runs in ./run: -r run" : "-r RUNDIR names another run directory");
    }
    return daemon::exit_failure;
  }
  const int status =
      command->scope == Scope::first
          ? ask_first(session, instances, words)
          : ask_each(session, instances, words, !flags.instance.empty() || !command->by.empty());
  output->end();
  // Whoever looks at a terminal should not have to guess.
  const bool lists = words.front() == "show" || command->words == "kv drain" || command->words == "kv du";
  if (interactive && !flags.json && lists && status == daemon::exit_ok && session.rows() == 0)
    std::fprintf(stderr, "di-ctl: there is nothing to show\n");
  return status;
}

}  // namespace di::ctl
