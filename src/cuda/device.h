// What the launches have to know of the current device, asked once.
#pragma once

namespace jaxnorm::cuda {

struct Device {
  int multiprocessors = 1;
  int shared_bytes = 0;  // the most that a block may be allowed, its kernel's own included
  int max_cluster = 1;   // the largest cluster, of blocks as large as any, that it can launch; 1: none
};

const Device& current_device();

}  // namespace jaxnorm::cuda
