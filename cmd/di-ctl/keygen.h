// cmd/di-ctl/keygen.h: makes the keys of an instance.
#pragma once

#include <string>

namespace di::ctl {

// Makes FOLDER/INSTANCE.secret (mode 0600) and appends the line of its public key to FOLDER/public_keys,
// which is also printed.  Never replaces a file.  Returns an exit status.
int make_keys(const std::string& instance, const std::string& folder);

}  // namespace di::ctl
