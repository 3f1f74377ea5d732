#include <cstdio>

#include "base/json.h"
#include "output.h"

namespace di::ctl {

namespace {

constexpr std::uint8_t number_kind = 1;
constexpr std::uint8_t boolean_kind = 2;
constexpr std::uint8_t json_kind = 3;

class JsonOutput final : public Output {
 public:
  void row(std::string_view instance, const wire::ctl_row& row) override {
    JsonWriter writer;
    writer.open_object();
    bool named = false;
    for (const wire::ControlColumn& column : row.columns) named = named || column.name == "instance";
    if (!named) {
      writer.key("instance");
      writer.string(instance);
    }
    for (const wire::ControlColumn& column : row.columns) {
      writer.key(column.name);
      // What a daemon calls a number is one, unless it is of another build: then it stays text.
      const bool bare =
          (column.kind == number_kind || column.kind == boolean_kind || column.kind == json_kind) &&
          Json::parse("[" + column.value + "]").ok();
      if (bare) {
        writer.raw(column.value);
      } else {
        writer.string(column.value);
      }
    }
    writer.close_object();
    const std::string line = writer.take() + "\n";
    std::fwrite(line.data(), 1, line.size(), stdout);
    std::fflush(stdout);
  }

  void end() override {}
};

}  // namespace

std::unique_ptr<Output> make_json_output() {
  return std::make_unique<JsonOutput>();
}

}  // namespace di::ctl
