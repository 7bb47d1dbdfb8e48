//! All GPUs of this machine and the processes on them, through NVIDIA's management library alone: a program that only
//! watches takes no memory of a GPU, as a CUDA context would.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong};

use lockstep_core::Bytes;

use super::error::GpuError;
use super::library::{LibrarySearch, function_table, open};
use super::nvml::{DIE, Handle, LIBRARY, NAMES, SUCCESS, Utilization};

/// `NVML_VALUE_NOT_AVAILABLE`
const NOT_AVAILABLE: u64 = u64::MAX;
/// Processes of a GPU that are listed.
const MAX_PROCESSES: usize = 64;

/// `nvmlMemory_t`
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlProcessInfo_t`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

function_table! {
    /// Functions of `libnvidia-ml.so.1`.
    struct MonitorTable {
        fn init = "nvmlInit_v2"() -> c_int;
        fn count = "nvmlDeviceGetCount_v2"(*mut c_uint) -> c_int;
        fn by_index = "nvmlDeviceGetHandleByIndex_v2"(c_uint, *mut Handle) -> c_int;
        fn name = "nvmlDeviceGetName"(Handle, *mut c_char, c_uint) -> c_int;
        fn memory = "nvmlDeviceGetMemoryInfo"(Handle, *mut Memory) -> c_int;
        fn power = "nvmlDeviceGetPowerUsage"(Handle, *mut c_uint) -> c_int;
        fn power_limit = "nvmlDeviceGetEnforcedPowerLimit"(Handle, *mut c_uint) -> c_int;
        fn temperature = "nvmlDeviceGetTemperature"(Handle, c_uint, *mut c_uint) -> c_int;
        fn utilization = "nvmlDeviceGetUtilizationRates"(Handle, *mut Utilization) -> c_int;
        fn processes = "nvmlDeviceGetComputeRunningProcesses_v3"(Handle, *mut c_uint, *mut ProcessInfo) -> c_int;
    }
}

/// The GPUs of this machine, for a program that watches them.
#[derive(Debug)]
pub struct GpuMonitor {
    table: MonitorTable,
    gpus: Vec<(Handle, String)>,
}

/// A GPU at one moment. `None`: its driver does not report that.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuUse {
    pub name: String,
    pub temperature_celsius: Option<f64>,
    pub power_watts: Option<f64>,
    pub power_limit_watts: Option<f64>,
    /// The share of time in which a kernel ran, between 0 and 1.
    pub utilization: Option<f64>,
    pub used: Bytes,
    pub total: Bytes,
    /// Process ids, as the host of the driver counts them, and their memory.
    pub processes: Vec<(u32, Option<Bytes>)>,
}

impl GpuMonitor {
    /// Finds the GPUs. Without NVIDIA's driver this is an error that says so.
    pub fn open(search: &LibrarySearch) -> Result<GpuMonitor, GpuError> {
        let table = MonitorTable::load(open(LIBRARY, &NAMES, search)?)?;
        let failed = |status| GpuError::Call { call: "NVML", text: format!("status {status}") };
        let mut count = 0;
        // SAFETY: `init` takes nothing; the count is written to a local variable.
        let status = unsafe {
            match (table.init)() {
                SUCCESS => (table.count)(&mut count),
                failed => failed,
            }
        };
        if status != SUCCESS {
            return Err(failed(status));
        }
        // A GPU that has fallen off the bus has no handle.
        let gpus = (0..count).filter_map(|index| handle(&table, index)).collect();
        Ok(GpuMonitor { table, gpus })
    }

    pub fn read(&self) -> Vec<GpuUse> {
        self.gpus.iter().map(|(device, name)| self.read_one(*device, name)).collect()
    }

    fn read_one(&self, device: Handle, name: &str) -> GpuUse {
        let table = &self.table;
        let (mut power, mut limit, mut celsius) = (0, 0, 0);
        let (mut used, mut memory) = (Utilization::default(), Memory::default());
        // SAFETY: the handle is this library's; every call writes to a local variable of the type in NVML's header.
        let status = unsafe {
            [
                (table.power)(device, &mut power),
                (table.power_limit)(device, &mut limit),
                (table.temperature)(device, DIE, &mut celsius),
                (table.utilization)(device, &mut used),
                (table.memory)(device, &mut memory),
            ]
        };
        let known = |i: usize, value: f64| (status[i] == SUCCESS).then_some(value);
        let bytes = |value: u64| if status[4] == SUCCESS { Bytes(value) } else { Bytes::ZERO };
        GpuUse {
            name: name.to_owned(),
            power_watts: known(0, f64::from(power) / 1e3),
            power_limit_watts: known(1, f64::from(limit) / 1e3),
            temperature_celsius: known(2, f64::from(celsius)),
            utilization: known(3, f64::from(used.gpu) / 100.0),
            used: bytes(memory.used),
            total: bytes(memory.total),
            processes: self.processes(device),
        }
    }

    /// The processes with a CUDA context on a GPU.
    fn processes(&self, device: Handle) -> Vec<(u32, Option<Bytes>)> {
        let mut list = [ProcessInfo::default(); MAX_PROCESSES];
        let mut count = MAX_PROCESSES as c_uint;
        // SAFETY: the handle is this library's; the list has as many entries as the count says, of the type in NVML's
        // header, and the count is a local variable.
        let status = unsafe { (self.table.processes)(device, &mut count, list.as_mut_ptr()) };
        // If the list is too short, it is not documented what has been written.
        let listed = if status == SUCCESS { (count as usize).min(MAX_PROCESSES) } else { 0 };
        let used = |process: &ProcessInfo| (process.used != NOT_AVAILABLE).then_some(Bytes(process.used));
        list[..listed].iter().map(|process| (process.pid, used(process))).collect()
    }
}

/// The handle and the name of a GPU.
fn handle(table: &MonitorTable, index: c_uint) -> Option<(Handle, String)> {
    let mut device = std::ptr::null_mut();
    let mut name = [0 as c_char; 96];
    // SAFETY: the handle and the name are written to local variables, the name within the length given.
    let status = unsafe {
        match (table.by_index)(index, &mut device) {
            SUCCESS => (table.name)(device, name.as_mut_ptr(), name.len() as c_uint),
            failed => failed,
        }
    };
    let bytes = name.map(|c| c as u8);
    let name = CStr::from_bytes_until_nul(&bytes).ok()?.to_string_lossy().into_owned();
    (status == SUCCESS).then_some((device, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_read_where_there_is_a_driver() {
        match GpuMonitor::open(&LibrarySearch::default()) {
            Ok(monitor) => {
                for gpu in monitor.read() {
                    assert!(gpu.total > gpu.used && !gpu.name.is_empty(), "{gpu:?}");
                    assert!(gpu.utilization.is_none_or(|share| (0.0..=1.0).contains(&share)), "{gpu:?}");
                }
            }
            Err(GpuError::LibraryMissing { .. }) => println!("skipped: there is no NVIDIA driver"),
            Err(cause) => println!("skipped: {cause}"),
        }
    }

    #[test]
    fn structs_have_the_sizes_of_the_header() {
        assert_eq!((size_of::<Memory>(), size_of::<ProcessInfo>()), (24, 24));
    }
}
