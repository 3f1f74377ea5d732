// cmd/di-ctl/keygen.h: makes the keys of an instance, and those of clients.
#pragma once

#include <string>

namespace di::ctl {

// Makes FOLDER/INSTANCE.secret (mode 0600) and appends the line of its public key to FOLDER/public_keys,
// which is also printed.  Never replaces a file.  Returns an exit status.
int make_keys(const std::string& instance, const std::string& folder);

// A new API key of `tenant`: the key alone on standard output, so that a file can take it, and on standard
// error what di-router's configuration holds of it, its digest.  Returns an exit status.
int make_api_key(const std::string& tenant);

}  // namespace di::ctl
