// The skeleton from outside: a process of its own (probe.cpp), its exit status, its files and its
// control socket.
#include "daemon/daemon.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "daemon/control.h"
#include "daemon/flags.h"
#include "http/client.h"

namespace di::daemon {
namespace {

constexpr Duration patience = seconds(20);

class DaemonTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/di-daemon-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    folder = pattern;
  }
  void TearDown() override {
    for (const pid_t pid : running) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    std::filesystem::remove_all(folder);
  }

  struct Process {
    pid_t pid = -1;
    Fd ready;  // our end of --ready-fd
  };

  Process start(std::vector<std::string> arguments, bool with_run_dir = true) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    Process process;
    process.ready = Fd(ends[0]);
    Fd theirs(ends[1]);
    if (with_run_dir) {
      arguments.insert(arguments.end(), {"--ready-fd", "9", "-o", "run.dir=" + folder + "/run"});
    }
    arguments.insert(arguments.begin(), DI_PROBE);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const std::string out = folder + "/out";
    const std::string err = folder + "/err";
    process.pid = ::fork();
    if (process.pid == 0) {
      ::dup2(theirs.get(), 9);
      ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), 1);
      ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644), 2);
      ::execv(DI_PROBE, argv.data());
      ::_exit(127);
    }
    running.push_back(process.pid);
    return process;
  }
  // True when the ready byte came; false when the process ended without it.
  static bool await_ready(const Process& process) {
    pollfd entry{process.ready.get(), POLLIN, 0};
    char byte = 0;
    return ::poll(&entry, 1, static_cast<int>(to_ms(patience))) == 1 &&
           ::read(process.ready.get(), &byte, 1) == 1;
  }
  int await_exit(const Process& process) {
    int status = 0;
    EXPECT_EQ(::waitpid(process.pid, &status, 0), process.pid);
    std::erase(running, process.pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
  int run(std::vector<std::string> arguments, bool with_run_dir = true) {
    return await_exit(start(std::move(arguments), with_run_dir));
  }
  std::string read(const std::string& name) const {
    std::ifstream in(folder + "/" + name);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }
  std::string file(const std::string& name, const std::string& text) const {
    std::ofstream(folder + "/" + name) << text;
    return folder + "/" + name;
  }
  std::string run_path(const std::string& suffix) const { return folder + "/run/di-probe.0." + suffix; }

  // The first row of an answer, or {"error": ...}.
  std::map<std::string, std::string> ask(const std::vector<std::string>& words) {
    std::map<std::string, std::string> first;
    Result<ControlClient> client = ControlClient::connect(run_path("ctl"), "test");
    if (!client) return {{"error", client.error().message}};
    const Status status = client->request(
        words,
        [&](const wire::ctl_row& row) {
          if (!first.empty()) return;
          for (const wire::ControlColumn& column : row.columns) first[column.name] = column.value;
        },
        patience);
    if (!status.ok()) first["error"] = status.error().message;
    return first;
  }

  std::string folder;
  std::vector<pid_t> running;
};

TEST_F(DaemonTest, LivesFromReadyToAGracefulStop) {
  const Process process = start({});
  ASSERT_TRUE(await_ready(process)) << read("err");
  EXPECT_NE(read("err").find(" info di-probe.0[" + std::to_string(process.pid) + "] daemon: ready"),
            std::string::npos);
  std::ifstream pid_file(run_path("pid"));
  pid_t pid = 0;
  pid_file >> pid;
  EXPECT_EQ(pid, process.pid);
  auto status = ask({"show", "status"});
  EXPECT_EQ(status["state"], "ready");
  EXPECT_EQ(ask({"show", "gauges"})["what"], "seats");
  EXPECT_EQ(ask({"show", "bogus"})["error"], "di-probe.0 has no command 'show bogus'");
  ASSERT_EQ(::kill(process.pid, SIGTERM), 0);
  EXPECT_EQ(await_exit(process), exit_ok);
  for (const char* suffix : {"pid", "ctl", "ro", "http", "sock"}) {
    EXPECT_FALSE(std::filesystem::exists(run_path(suffix))) << suffix;
  }
}

TEST_F(DaemonTest, ALoopThatDoesNotMoveMakesItUnready) {
  const Process process = start({"-o", "clock.manual=true"});
  ASSERT_TRUE(await_ready(process)) << read("err");
  Result<http::Client> client = http::Client::connect("unix:" + run_path("http"), patience);
  ASSERT_TRUE(client.ok()) << client.error().message;
  EXPECT_EQ(client->get("/health/ready")->status, 200);
  ask({"clock", "advance", "61000"});
  const Result<http::ClientReply> late = client->get("/health/ready");
  ASSERT_TRUE(late.ok()) << late.error().message;
  EXPECT_EQ(late->status, 503);
  EXPECT_EQ(late->body, "late: probe\n");
  EXPECT_EQ(client->get("/health")->status, 200);
  EXPECT_EQ(ask({"show", "status"})["state"], "late");
  EXPECT_EQ(ask({"show", "status"})["late"], "probe");
  EXPECT_NE(client->get("/metrics")->body.find("\ndi_heartbeat_late{loop=\"probe\"} 1\n"), std::string::npos);
  ask({"beat"});
  EXPECT_EQ(client->get("/health/ready")->status, 200);
  EXPECT_EQ(ask({"show", "status"})["state"], "ready");
}

TEST_F(DaemonTest, WhatItServesWithoutIsSaidAndItStaysReady) {
  const Process process = start({});
  ASSERT_TRUE(await_ready(process)) << read("err");
  Result<http::Client> client = http::Client::connect("unix:" + run_path("http"), patience);
  ASSERT_TRUE(client.ok()) << client.error().message;
  EXPECT_EQ(client->get("/health/ready")->body, "ready\n");
  EXPECT_EQ(ask({"show", "status"})["degraded"], "");
  ask({"degraded", "volume 1\nis gone"});
  const Result<http::ClientReply> reply = client->get("/health/ready");
  ASSERT_TRUE(reply.ok()) << reply.error().message;
  EXPECT_EQ(reply->status, 200);
  EXPECT_EQ(reply->body, "ready\ndegraded: volume 1 is gone\n");
  EXPECT_EQ(ask({"show", "status"})["degraded"], "volume 1 is gone");
  EXPECT_EQ(ask({"show", "status"})["state"], "ready");
  EXPECT_NE(client->get("/metrics")->body.find("\ndi_degraded 1\n"), std::string::npos);
  // What is too long is cut, between two letters: there would be room for the first byte of one.
  const std::string fits(degraded_bytes_max - 4, 'x');
  ask({"degraded", fits + "\u00e4 and more"});
  EXPECT_EQ(ask({"show", "status"})["degraded"], fits + "...");
  ask({"degraded"});
  EXPECT_EQ(client->get("/health/ready")->body, "ready\n");
  EXPECT_NE(client->get("/metrics")->body.find("\ndi_degraded 0\n"), std::string::npos);
}

TEST_F(DaemonTest, WithNothingLeftToServeWithItIsNotReadyAndStaysUp) {
  const Process process = start({});
  ASSERT_TRUE(await_ready(process)) << read("err");
  Result<http::Client> client = http::Client::connect("unix:" + run_path("http"), patience);
  ASSERT_TRUE(client.ok()) << client.error().message;
  ask({"degraded", "volume 0 is gone", "serves nothing"});
  const Result<http::ClientReply> reply = client->get("/health/ready");
  ASSERT_TRUE(reply.ok()) << reply.error().message;
  EXPECT_EQ(reply->status, 503);
  EXPECT_EQ(reply->body, "out of service: volume 0 is gone\n");
  EXPECT_EQ(client->get("/health")->status, 200);
  EXPECT_EQ(ask({"show", "status"})["state"], "out of service");
  EXPECT_NE(client->get("/metrics")->body.find("\ndi_degraded 1\n"), std::string::npos);
  // The same words, and one of two serves again.
  ask({"degraded", "volume 0 is gone"});
  EXPECT_EQ(client->get("/health/ready")->body, "ready\ndegraded: volume 0 is gone\n");
}

TEST_F(DaemonTest, MetricsAreServedOnTheUnixSocket) {
  const Process process = start({});
  ASSERT_TRUE(await_ready(process)) << read("err");
  Result<http::Client> client = http::Client::connect("unix:" + run_path("http"), patience);
  ASSERT_TRUE(client.ok()) << client.error().message;
  const Result<http::ClientReply> reply = client->get("/metrics");
  ASSERT_TRUE(reply.ok()) << reply.error().message;
  EXPECT_EQ(reply->status, 200);
  EXPECT_NE(reply->body.find("\ndi_held{what=\"seats\"} 2\n"), std::string::npos) << reply->body;
  EXPECT_EQ(client->get("/bogus")->status, 404);
}

TEST_F(DaemonTest, SecondStartSaysWhoRuns) {
  const Process process = start({});
  ASSERT_TRUE(await_ready(process)) << read("err");
  EXPECT_EQ(run({}), exit_failure);
  EXPECT_NE(read("err").find("already running as process " + std::to_string(process.pid)), std::string::npos)
      << read("err");
  EXPECT_EQ(ask({"show", "status"})["state"], "ready") << "the first one goes on";
}

TEST_F(DaemonTest, StartsAgainAfterAKill) {
  const Process process = start({});
  ASSERT_TRUE(await_ready(process)) << read("err");
  ASSERT_EQ(::kill(process.pid, SIGKILL), 0);
  EXPECT_EQ(await_exit(process), 1000 + SIGKILL);
  const Process again = start({});
  EXPECT_TRUE(await_ready(again)) << read("err");
}

TEST_F(DaemonTest, FailureAtTheStartIsOneErrorLineAndStatusOne) {
  const Process process = start({"-o", "probe.broken=true"});
  EXPECT_FALSE(await_ready(process));
  EXPECT_EQ(await_exit(process), exit_failure);
  const std::string err = read("err");
  EXPECT_NE(err.find("daemon: cannot start error=\"the probe is broken\"\n"), std::string::npos) << err;
  EXPECT_EQ(err.find(" error "), err.rfind(" error ")) << err;
  EXPECT_FALSE(std::filesystem::exists(run_path("pid")));
}

TEST_F(DaemonTest, AStopWhileItPreparesIsNoFailure) {
  const Process process = start({"-o", "probe.slow_start=true"});
  ASSERT_TRUE(await_ready(process)) << read("err");  // the probe's word that it is busy
  ASSERT_EQ(::kill(process.pid, SIGTERM), 0);
  EXPECT_EQ(await_exit(process), exit_ok) << read("err");
  EXPECT_NE(read("err").find("daemon: stopped before it had started"), std::string::npos) << read("err");
  EXPECT_FALSE(std::filesystem::exists(run_path("pid")));
}

TEST_F(DaemonTest, RuntimeFailureIsStatusOne) {
  const Process process = start({});
  ASSERT_TRUE(await_ready(process)) << read("err");
  ask({"fail"});
  EXPECT_EQ(await_exit(process), exit_failure);
  EXPECT_NE(read("err").find("cannot go on error=\"told to\""), std::string::npos);
}

// A router that could not go on cut its streams, and nobody was charged for them.
TEST_F(DaemonTest, WhatIsLeftIsEndedAtARuntimeFailureWithoutAWait) {
  const Process process = start({"-o", "probe.slow_stop=true", "-o", "drain.timeout=1h"});
  ASSERT_TRUE(await_ready(process)) << read("err");
  ask({"fail"});
  EXPECT_EQ(await_exit(process), exit_failure);
  EXPECT_NE(read("err").find("the probe ends what is left"), std::string::npos) << read("err");
}

TEST_F(DaemonTest, EveryConfigurationErrorIsReportedAndStatusIs78) {
  const std::string path = file("bad.toml", "bogus = 1\n[probe]\nvalue = 1000\n");
  EXPECT_EQ(run({"-f", path, "-o", "log.level=loud"}), exit_config);
  EXPECT_EQ(read("err"), "di-probe: " + path + ":1:1: unknown key 'bogus'\n" + "di-probe: " + path +
                             ":3:9: probe.value: 1000 is out of range: want 0 to 100\n" +
                             "di-probe: -o log.level=loud: unknown word \"loud\": want \"error\", \"warn\", "
                             "\"info\" or \"debug\"\n");
  EXPECT_FALSE(std::filesystem::exists(folder + "/run"));
}

TEST_F(DaemonTest, WhatOthersCanReachNeedsKeysOrTheWord) {
  const std::string want = "without keys: set net.secret_key, or net.insecure in a closed network\n";
  const std::string path =
      file("open.toml", "[net]\nbind = \"tcp://0.0.0.0:0\"\n[meta]\nendpoint = \"tcp://10.0.0.1:7400\"\n");
  EXPECT_EQ(run({"-f", path}), exit_config);
  EXPECT_EQ(read("err"), "di-probe: " + path + ":2:8: net.bind: tcp://0.0.0.0:0 would serve other machines " +
                             want + "di-probe: " + path +
                             ":4:12: meta.endpoint: tcp://10.0.0.1:7400 would be used " + want);
  EXPECT_EQ(run({"-n", "-f", path, "-o", "net.insecure=true"}), exit_ok);
  EXPECT_EQ(run({"-n", "-o", "net.bind=tcp://127.0.0.1:0", "-o", "meta.endpoint=tcp://127.0.0.1:1"}),
            exit_ok);
}

TEST_F(DaemonTest, WrongKeyFilesAreFoundBeforeAnythingStarts) {
  const net::KeyPair pair = net::key_pair_make();
  const std::string secret = file("di-probe.0.secret", pair.secret_key + "\n");
  ASSERT_EQ(::chmod(secret.c_str(), 0644), 0);
  const std::string keys = file("keys", "# nobody\nshort\n");
  const std::string path =
      file("keys.toml",
           "[net]\nsecret_key = \"di-probe.0.secret\"\npublic_keys = \"keys\"\ninsecure = true\n"
           "[meta]\nendpoint = \"tcp://127.0.0.1:1\"\npublic_key = \"short\"\n");
  EXPECT_EQ(run({"-f", path}), exit_config);
  EXPECT_EQ(read("err"),
            "di-probe: " + path + ":7:14: meta.public_key: want a public key of 40 characters\n");
  std::filesystem::remove(folder + "/err");
  file("keys.toml",
       "[net]\nsecret_key = \"di-probe.0.secret\"\npublic_keys = \"keys\"\ninsecure = true\n"
       "[meta]\nendpoint = \"tcp://127.0.0.1:1\"\n");
  EXPECT_EQ(run({"-f", path}), exit_config);
  EXPECT_EQ(read("err"), "di-probe: " + path + ":2:14: net.secret_key: " + secret +
                             ": others than its owner may use it: chmod 600\n" + "di-probe: " + path +
                             ":4:12: net.insecure: has no meaning with net.secret_key\n" + "di-probe: " +
                             keys + ":2:1: want a public key of 40 characters\n" + "di-probe: " + path +
                             ":6:12: meta.endpoint: tcp://127.0.0.1:1 needs meta.public_key\n");
  std::filesystem::remove(folder + "/err");
  EXPECT_EQ(run({"-o", "net.public_keys=" + keys}), exit_config);
  EXPECT_NE(read("err").find("net.public_keys: has no meaning without net.secret_key"), std::string::npos);
}

TEST_F(DaemonTest, ReloadReadsTheKeysAgainAndAFileWithAnErrorChangesNothing) {
  const net::KeyPair pair = net::key_pair_make();
  const std::string secret = file("di-probe.0.secret", pair.secret_key + "\n");
  ASSERT_EQ(::chmod(secret.c_str(), 0600), 0);
  const std::string keys = file("keys", pair.public_key + " di-probe.0\n");
  const Process process = start({"-o", "net.secret_key=" + folder, "-o", "net.public_keys=" + keys, "-o",
                                 "net.bind=tcp://127.0.0.1:0"});
  ASSERT_TRUE(await_ready(process)) << read("err");
  file("keys", pair.public_key + " di-probe.0\n" + pair.public_key + "\n");
  EXPECT_EQ(ask({"reload"})["error"], keys + ":2:1: this key stands in the file already");
  file("keys", "");
  EXPECT_EQ(ask({"reload"})["error"], "");
  std::filesystem::remove(keys);
  EXPECT_NE(ask({"reload"})["error"].find("keys"), std::string::npos);
  ::kill(process.pid, SIGTERM);
  EXPECT_EQ(await_exit(process), exit_ok);
}

TEST_F(DaemonTest, UsageErrorsAre64) {
  EXPECT_EQ(run({"--bogus"}, false), exit_usage);
  EXPECT_EQ(run({"extra"}, false), exit_usage);
  EXPECT_EQ(run({"-f", "a", "-f", "b"}, false), exit_usage);
  EXPECT_NE(read("err").find("di-probe: "), std::string::npos);
  // Nobody would be told that it serves.
  for (const char* no : {"x", "-1", "7x", "99999999999"}) {
    EXPECT_EQ(run({"--ready-fd", no}, false), exit_usage);
    EXPECT_TRUE(read("err").ends_with("\ndi-probe: --ready-fd: " + std::string(no) + " is no descriptor\n"))
        << read("err");
  }
  EXPECT_EQ(run({"--ready-fd", "77"}, false), exit_usage);
  EXPECT_TRUE(read("err").ends_with("\ndi-probe: --ready-fd: 77 is not open\n")) << read("err");
}

TEST_F(DaemonTest, AFolderThatADaemonLeftEmptyDoesNotHideTheFleetBesideUs) {
  const std::string system = folder + "/system";
  const std::string local = folder + "/local";
  EXPECT_EQ(find_run_dir(system, local), local);
  std::filesystem::create_directory(system);
  EXPECT_EQ(find_run_dir(system, local), system);
  std::filesystem::create_directory(local);
  file("local/key", "");
  EXPECT_EQ(find_run_dir(system, local), system);
  file("local/di-meta.0.ro", "");
  EXPECT_EQ(find_run_dir(system, local), local);
  file("system/di-meta.0.ro", "");
  EXPECT_EQ(find_run_dir(system, local), system);
}

TEST_F(DaemonTest, HelpAndVersionAndCheckExitWithZero) {
  EXPECT_EQ(run({"-h"}, false), exit_ok);
  EXPECT_NE(read("out").find("--ready-fd"), std::string::npos);
  EXPECT_EQ(run({"-V"}, false), exit_ok);
  EXPECT_TRUE(read("out").starts_with("di-probe ")) << read("out");
  EXPECT_EQ(run({"-n"}, false), exit_ok);
  EXPECT_EQ(read("out"), "");
  EXPECT_EQ(run({"-nvv", "-o", "probe.value=7"}, false), exit_ok);
  const std::string printed = read("out");
  EXPECT_NE(printed.find("value = 7\n"), std::string::npos) << printed;
  // What is printed is a configuration.
  const std::string path = file("printed.toml", printed);
  EXPECT_EQ(run({"-nvv", "-f", path}, false), exit_ok);
  EXPECT_EQ(read("out"), printed);
}

TEST_F(DaemonTest, ReloadTakesWhatMayChangeAndKeepsTheRestAsAWhole) {
  const std::string path = file("p.toml", "probe.value = 2\n");
  const Process process = start({"-f", path});
  ASSERT_TRUE(await_ready(process)) << read("err");
  EXPECT_EQ(ask({"value"})["value"], "2");
  file("p.toml", "probe.value = 3\n");
  EXPECT_EQ(ask({"reload"})["error"], "");
  EXPECT_EQ(ask({"value"})["value"], "3");
  file("p.toml", "probe.value = 4\nprobe.fixed = 9\n");
  EXPECT_EQ(ask({"reload"})["error"], "needs a restart to change: probe.fixed");
  EXPECT_EQ(ask({"value"})["value"], "3");
  file("p.toml", "probe.value = 5\nbogus = 1\n");
  EXPECT_EQ(ask({"reload"})["error"], path + ":2:1: unknown key 'bogus'");
  EXPECT_EQ(ask({"value"})["value"], "3");
  file("p.toml", "probe.value = 13\n");
  EXPECT_EQ(ask({"reload"})["error"], "thirteen is not taken");
  EXPECT_EQ(ask({"value"})["value"], "3");
  file("p.toml", "probe.value = 6\n");
  ASSERT_EQ(::kill(process.pid, SIGHUP), 0);
  const MonotonicClock clock;
  const Instant end = clock.now() + patience;
  std::string value;
  while (value != "6" && clock.now() < end) value = ask({"value"})["value"];
  EXPECT_EQ(value, "6");
}

TEST_F(DaemonTest, ReloadChangesTheTimeInWhichItMayStop) {
  const std::string path = file("p.toml", "probe.slow_stop = true\n[drain]\ntimeout = \"30s\"\n");
  const Process process = start({"-f", path});
  ASSERT_TRUE(await_ready(process)) << read("err");
  file("p.toml", "probe.slow_stop = true\n[drain]\ntimeout = \"50ms\"\n");
  EXPECT_EQ(ask({"reload"})["error"], "");
  ASSERT_EQ(::kill(process.pid, SIGTERM), 0);
  EXPECT_EQ(await_exit(process), exit_ok);
  EXPECT_NE(read("err").find("gave up waiting for what is left drain_timeout_ms=50"), std::string::npos)
      << read("err");
}

TEST_F(DaemonTest, ReloadChangesTheLogLevelWhenItsRowChanged) {
  const std::string path = file("p.toml", "probe.value = 2\n");
  const Process process = start({"-f", path});
  ASSERT_TRUE(await_ready(process)) << read("err");
  EXPECT_EQ(ask({"debug"})["debug"], "false");
  EXPECT_EQ(ask({"log", "debug"})["error"], "");
  file("p.toml", "probe.value = 3\n");
  EXPECT_EQ(ask({"reload"})["error"], "");
  EXPECT_EQ(ask({"debug"})["debug"], "true") << "somebody had asked for it";
  file("p.toml", "probe.value = 3\nlog.level = \"warn\"\n");
  EXPECT_EQ(ask({"reload"})["error"], "");
  EXPECT_EQ(ask({"debug"})["debug"], "false");
}

TEST_F(DaemonTest, ReloadLeavesWhatTheCommandLineSaysOfTheLog) {
  const std::string path = file("p.toml", "probe.value = 2\n");
  const Process process = start({"-v", "-f", path});
  ASSERT_TRUE(await_ready(process)) << read("err");
  file("p.toml", "probe.value = 2\nlog.level = \"warn\"\n");
  EXPECT_EQ(ask({"reload"})["error"], "");
  EXPECT_EQ(ask({"debug"})["debug"], "true");
}

TEST_F(DaemonTest, MayOpenAsManyFilesAsItsHardLimitSays) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 256;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const Process process = start({});
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_TRUE(await_ready(process)) << read("err");
  rlimit theirs{};
  ASSERT_EQ(::prlimit(process.pid, RLIMIT_NOFILE, nullptr, &theirs), 0);
  EXPECT_EQ(theirs.rlim_cur, before.rlim_max);
}

// di-meta would refuse it for ever, or nobody would be found there.
TEST_F(DaemonTest, NamesAndAddressesThatCannotServeAreFoundByTheCheck) {
  const std::vector<std::pair<std::string, std::string>> wrong{
      {"run.instance=di-probe.a b", "'di-probe.a b' is not an instance of di-probe"},
      {"run.instance=di-probe.a.b", "'di-probe.a.b' is not an instance of di-probe"},
      {"run.instance=di-probe." + std::string(65, 'x'), "is not an instance of di-probe"},
      {"net.host=rack 7", "want at most 64 letters"},
      {"net.rack=r/7", "want at most 64 letters"},
      {"net.zone=" + std::string(65, 'z'), "want at most 64 letters"},
      {"net.advertise=10.0.0.5:7000", "'10.0.0.5:7000' is no address: want tcp://HOST:PORT or ipc://PATH"},
      {"net.advertise=nonsense", "is no address"},
      {"net.advertise=tcp://*:0", "is no address"},
      {"net.advertise=tcp://0.0.0.0:7000", "every address of this machine says nothing to others"},
      {"net.advertise=tcp://[::]:0", "every address of this machine says nothing to others"},
      {"meta.endpoint=10.0.0.1:7400", "'10.0.0.1:7400' is no address: want tcp://HOST:PORT or ipc://PATH"}};
  for (const auto& [row, why] : wrong) {
    EXPECT_EQ(run({"-n", "-o", row}, false), exit_config) << row;
    EXPECT_NE(read("err").find(why), std::string::npos) << row << ": " << read("err");
    std::filesystem::remove(folder + "/err");
  }
  for (const char* good :
       {"tcp://10.0.0.5:0", "tcp://kv.lab.example:7000", "tcp://[::1]:0", "ipc://run/x:0", ""}) {
    EXPECT_EQ(run({"-n", "-o", std::string("net.advertise=") + good}), exit_ok)
        << good << ": " << read("err");
  }
  EXPECT_EQ(run({"-o", "net.advertise=tcp://10.0.0.5:0"}), exit_failure);
  EXPECT_NE(read("err").find("net.bind has no port to put in place of 0"), std::string::npos) << read("err");
  std::filesystem::remove(folder + "/err");
  EXPECT_EQ(run({"-n", "-o", "run.instance=di-probe.A-z_9", "-o", "net.host=a.b:7", "-o",
                 "meta.endpoint=ipc://run/m.sock"},
                false),
            exit_ok)
      << read("err");
}

TEST_F(DaemonTest, ManualClockAdvancesByControl) {
  const Process process = start({"-o", "clock.manual=true"});
  ASSERT_TRUE(await_ready(process)) << read("err");
  EXPECT_EQ(ask({"value"})["ticks"], "0");
  EXPECT_EQ(ask({"clock", "advance", "105"})["now_ms"], "1105");
  EXPECT_EQ(ask({"value"})["ticks"], "10");
  EXPECT_EQ(ask({"clock", "advance", "soon"})["error"], "'soon' is not a number of milliseconds");
}

TEST_F(DaemonTest, RealClockCannotBeAdvanced) {
  const Process process = start({});
  ASSERT_TRUE(await_ready(process)) << read("err");
  EXPECT_EQ(ask({"clock", "advance", "1"})["error"], "clock.manual is false: product time is real time");
}

TEST_F(DaemonTest, FaultKillsOnceAndTheRestartedInstanceGoesOn) {
  const std::string fault_at = "fault.at=decode_mid_step:2=kill";
  const Process process = start({"-o", fault_at});
  ASSERT_TRUE(await_ready(process)) << read("err");
  EXPECT_EQ(ask({"hit"})["error"], "");
  EXPECT_NE(ask({"hit"})["error"], "");
  EXPECT_EQ(await_exit(process), 1000 + SIGKILL);
  const Process again = start({"-o", fault_at});
  ASSERT_TRUE(await_ready(again)) << read("err");
  for (int i = 0; i < 4; ++i) EXPECT_EQ(ask({"hit"})["error"], "");
}

TEST_F(DaemonTest, WhatDoesNotStopIsGivenUpAfterTheTimeout) {
  const Process process = start({"-o", "probe.slow_stop=true", "-o", "drain.timeout=50ms"});
  ASSERT_TRUE(await_ready(process)) << read("err");
  ASSERT_EQ(::kill(process.pid, SIGTERM), 0);
  EXPECT_EQ(await_exit(process), exit_ok);
  EXPECT_NE(read("err").find("gave up waiting"), std::string::npos);
}

TEST_F(DaemonTest, SecondTermExitsAtOnce) {
  const Process process = start({"-o", "probe.slow_stop=true", "-o", "drain.timeout=1h"});
  ASSERT_TRUE(await_ready(process)) << read("err");
  ASSERT_EQ(::kill(process.pid, SIGTERM), 0);
  const MonotonicClock clock;
  const Instant end = clock.now() + patience;
  while (ask({"show", "status"})["state"] != "stopping" && clock.now() < end) {
  }
  ASSERT_EQ(::kill(process.pid, SIGTERM), 0);
  EXPECT_EQ(await_exit(process), exit_failure);
}

TEST_F(DaemonTest, LogLevelChangesWhileRunning) {
  const Process process = start({});
  ASSERT_TRUE(await_ready(process)) << read("err");
  EXPECT_EQ(ask({"log", "debug", "net"})["error"], "");
  EXPECT_EQ(ask({"log", "loud"})["error"], "'loud' is not a log level: want error, warn, info or debug");
}

}  // namespace
}  // namespace di::daemon
