//! The GPUs of this machine, and the processes on them.

use lockstep_core::Bytes;

use crate::canvas::{Canvas, DIM, PLAIN, TITLE};
use crate::snapshot::{GpuStatus, Snapshot};

/// A narrower panel leaves the power out.
const NARROW: u16 = 48;
/// Processes of a GPU that are listed.
const PROCESSES: usize = 3;

pub(crate) fn rows(snapshot: &Snapshot) -> u16 {
    match snapshot.gpus.len() {
        0 => 0,
        gpus => {
            1 + gpus as u16
                + snapshot.gpus.iter().map(|gpu| gpu.processes.len().min(PROCESSES) as u16).sum::<u16>()
        }
    }
}

pub(crate) fn draw(snapshot: &Snapshot, canvas: &mut Canvas<'_>) {
    let name = snapshot.gpus.first().map_or("", |gpu| &gpu.name);
    canvas.title("GPUs of this machine", name);
    // Without room for all processes, GPUs come first.
    let mut room = usize::from(canvas.height().saturating_sub(1)).saturating_sub(snapshot.gpus.len());
    let mut y = 1;
    for (index, gpu) in snapshot.gpus.iter().enumerate() {
        draw_gpu(index, gpu, y, canvas);
        y += 1;
        let listed = gpu.processes.len().min(PROCESSES).min(room);
        room -= listed;
        for (pid, bytes) in &gpu.processes[..listed] {
            let rank = snapshot.ranks.iter().find(|status| status.pid == *pid);
            let rank = rank.map_or_else(String::new, |status| format!(", rank {}", status.rank));
            let bytes = bytes.map_or_else(String::new, |bytes| Bytes(bytes).to_string());
            canvas.put(5, y, &format!("process {pid}{rank}"), DIM);
            canvas.put_right(canvas.width(), y, &bytes, DIM);
            y += 1;
        }
    }
}

fn draw_gpu(index: usize, gpu: &GpuStatus, y: u16, canvas: &mut Canvas<'_>) {
    let width = canvas.width();
    let power = match (gpu.power_watts, gpu.power_limit_watts) {
        (Some(power), Some(limit)) => format!("{power:.0}/{limit:.0} W"),
        (Some(power), None) => format!("{power:.0} W"),
        _ => String::new(),
    };
    let temperature = gpu.temperature_celsius.map_or_else(String::new, |celsius| format!("{celsius:.0} °C"));
    let busy = gpu.utilization.map_or_else(String::new, |share| format!("{:.0} %", 100.0 * share));
    let narrow = width < NARROW;
    let sensors = match narrow {
        true => format!("{busy:>5} {temperature:>6}"),
        false => format!("{busy:>5} {temperature:>6} {power:>10}"),
    };
    let end = canvas.line(y, &[(&format!(" {index}  "), TITLE), (&sensors, PLAIN)]);
    let memory = format!("{} of {}", Bytes(gpu.used_bytes), Bytes(gpu.total_bytes));
    let bar = width.saturating_sub(end + memory.chars().count() as u16 + 2);
    canvas.bar(end + 1, y, bar, gpu.used_bytes as f64 / gpu.total_bytes.max(1) as f64, DIM);
    canvas.put_right(width, y, &memory, PLAIN);
}
