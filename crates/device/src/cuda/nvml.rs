//! NVIDIA's management library: the energy, power, temperature and utilization of a GPU. It comes with the driver and is
//! opened at run time; where it is missing, these numbers are, too.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use super::error::GpuError;
use super::gpu::Gpu;
use super::library::{LibrarySearch, function_table, open};

pub(super) type Handle = *mut c_void;

pub(super) const LIBRARY: &str = "NVIDIA's management library";
pub(super) const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// NVML_TEMPERATURE_GPU
pub(super) const DIE: c_uint = 0;
pub(super) const SUCCESS: c_int = 0;

/// `nvmlUtilization_t`, in percent.
#[repr(C)]
#[derive(Default)]
pub(super) struct Utilization {
    pub(super) gpu: c_uint,
    memory: c_uint,
}

function_table! {
    /// Functions of `libnvidia-ml.so.1`.
    struct NvmlTable {
        fn init = "nvmlInit_v2"() -> c_int;
        fn by_bus_id = "nvmlDeviceGetHandleByPciBusId_v2"(*const c_char, *mut Handle) -> c_int;
        fn energy = "nvmlDeviceGetTotalEnergyConsumption"(Handle, *mut c_ulonglong) -> c_int;
        fn power = "nvmlDeviceGetPowerUsage"(Handle, *mut c_uint) -> c_int;
        fn temperature = "nvmlDeviceGetTemperature"(Handle, c_uint, *mut c_uint) -> c_int;
        fn utilization = "nvmlDeviceGetUtilizationRates"(Handle, *mut Utilization) -> c_int;
    }
}

/// The sensors of one GPU.
pub struct GpuSensors {
    table: NvmlTable,
    device: Handle,
}

// SAFETY: NVML's functions may be called from any thread, and the handle stays valid while the library is loaded.
unsafe impl Send for GpuSensors {}

/// What a GPU's sensors report. `None`: this GPU has no such sensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GpuReading {
    /// Since the driver was loaded.
    pub energy_joules: Option<f64>,
    pub power_watts: Option<f64>,
    pub temperature_celsius: Option<f64>,
    /// The share of time in which a kernel ran, between 0 and 1.
    pub utilization: Option<f64>,
}

impl GpuSensors {
    /// Finds the sensors of `gpu`.
    pub fn open(gpu: &Gpu, search: &LibrarySearch) -> Result<GpuSensors, GpuError> {
        let table = NvmlTable::load(open(LIBRARY, &NAMES, search)?)?;
        let bus_id = gpu.pci_bus_id()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: `init` takes nothing; the bus id ends with a zero byte, and the handle is written to a local variable.
        let status = unsafe {
            match (table.init)() {
                SUCCESS => (table.by_bus_id)(bus_id.as_ptr(), &mut device),
                failed => failed,
            }
        };
        match status {
            SUCCESS => Ok(GpuSensors { table, device }),
            _ => Err(GpuError::Call { call: "NVML", text: format!("status {status}") }),
        }
    }

    pub fn read(&self) -> GpuReading {
        let (device, table) = (self.device, &self.table);
        let (mut millijoules, mut milliwatts, mut celsius) = (0, 0, 0);
        let mut used = Utilization::default();
        // SAFETY: the handle is this library's; every call writes to a local variable of the type in NVML's header.
        let status = unsafe {
            [
                (table.energy)(device, &mut millijoules),
                (table.power)(device, &mut milliwatts),
                (table.temperature)(device, DIE, &mut celsius),
                (table.utilization)(device, &mut used),
            ]
        };
        let known = |i: usize, value: f64| (status[i] == SUCCESS).then_some(value);
        GpuReading {
            energy_joules: known(0, millijoules as f64 / 1e3),
            power_watts: known(1, f64::from(milliwatts) / 1e3),
            temperature_celsius: known(2, f64::from(celsius)),
            utilization: known(3, f64::from(used.gpu) / 100.0),
        }
    }
}

impl std::fmt::Debug for GpuSensors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuSensors({:?})", self.table)
    }
}
