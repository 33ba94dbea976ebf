// What Python calls, through ctypes: no header of Python is needed to build it, and no call passes torch's dispatcher,
// so a mode or a compiler that is being tested does not see the simulator. Nothing here raises.
#include "devices.h"

extern "C" {

void simulated_set_devices(int count, int64_t bytes) {
  simulated::set_device_count(count);
  simulated::set_memory_size(bytes);
}
void simulated_keep_freed_blocks(bool on) { simulated::keep_freed_blocks(on); }
void simulated_set_peer_access(int source, int destination, bool allowed) {
  simulated::set_peer_access(source, destination, allowed);
}
bool simulated_peer_access(int source, int destination) { return simulated::peer_access(source, destination); }
void simulated_set_fault(const simulated::Fault* fault) { simulated::set_fault(*fault); }
void simulated_clear_faults() { simulated::clear_faults(); }
int64_t simulated_copy_count() { return simulated::copy_count(); }
int64_t simulated_read_copies(simulated::Copy* into, int64_t most) { return simulated::read_copies(into, most); }
void simulated_clear_copies() { simulated::clear_copies(); }
int64_t simulated_late_copies() { return simulated::late_copies(); }
int64_t simulated_kernel_count() { return simulated::kernel_count(); }

}  // extern "C"
