//! `zf doctor`: what works on this machine, and what to do about the rest.

use std::fs;
use std::hint::black_box;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use zf_core::files::{free_space, rename_dir_synced, write_atomic};
use zf_core::stage::{HostSlice, Hyper, Optimizer, Out};
use zf_sys::device;

use super::size::bytes;

/// The version of libtorch that this program is made for.
const LIBTORCH: &str = "2.11";

/// Bytes of the copy and of the file that are timed.
const PROBE: usize = 64 << 20;

/// How well something works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Good,
    /// Works, but worse than it could.
    Poor,
    /// Training will fail.
    Bad,
}

/// One line of the report.
#[derive(Debug)]
struct Finding {
    health: Health,
    what: &'static str,
    found: String,
    /// What to do, where it is not good.
    advice: Option<String>,
}

/// Looks at libtorch, cores, memory, the file system of `folder` (where runs would go) and the cache, and prints a line
/// for each.
///
/// # Errors
/// When something is so wrong that training would fail, after the whole report.
pub fn run(folder: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let (speed, copy) = copy_speed();
    let mut findings = vec![libtorch(), devices(), cores(), memory(), copy, host_update(speed)];
    findings.push(files("run folder", folder));
    findings.push(match cache_folder() {
        Some(cache) => files("cache", &cache),
        None => Finding {
            health: Health::Poor,
            what: "cache",
            found: "no home folder".into(),
            advice: Some("set HOME or XDG_CACHE_HOME to a folder that stays".into()),
        },
    });
    report(&findings, out)
}

fn report(findings: &[Finding], out: &mut dyn Write) -> anyhow::Result<()> {
    for finding in findings {
        let mark = match finding.health {
            Health::Good => "ok",
            Health::Poor => "poor",
            Health::Bad => "BAD",
        };
        writeln!(out, "{mark:<5} {:<14} {}", finding.what, finding.found)?;
        if let Some(advice) = &finding.advice {
            writeln!(out, "{:<20} -> {advice}", "")?;
        }
    }
    out.flush()?;
    let bad: Vec<&str> = findings.iter().filter(|f| f.health == Health::Bad).map(|f| f.what).collect();
    anyhow::ensure!(bad.is_empty(), "training would fail on this machine: {}", bad.join(", "));
    Ok(())
}

fn libtorch() -> Finding {
    let version = device::libtorch_version();
    let matches = version.starts_with(LIBTORCH);
    Finding {
        health: if matches { Health::Good } else { Health::Bad },
        what: "libtorch",
        found: format!("{version}, CPU kernels for {}", device::cpu_capability()),
        advice: (!matches).then(|| format!("this program needs libtorch {LIBTORCH}: build it again with `make build`")),
    }
}

fn devices() -> Finding {
    let (found, advice) = match (device::has_cuda_build(), device::cuda_available()) {
        (true, true) => ("CUDA", None),
        (true, false) => ("CPU; libtorch has CUDA, but there is no device or driver", None),
        (false, _) if Path::new("/dev/nvidia0").exists() => (
            "CPU; this machine has a CUDA device, but libtorch is built without CUDA",
            Some("set LIBTORCH to a CUDA build of libtorch 2.11 and build again".to_owned()),
        ),
        (false, _) => ("CPU, also with memory of a fixed size (`device.kind = \"emulated\"`)", None),
    };
    let health = if advice.is_none() { Health::Good } else { Health::Poor };
    Finding { health, what: "devices", found: found.into(), advice }
}

fn cores() -> Finding {
    // The standard library counts what affinity and the control group leave.
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let all = text.lines().filter(|line| line.starts_with("processor")).count();
    let found = if usable < all {
        format!("{usable} usable of {all} (affinity or control group)")
    } else {
        format!("{usable} usable")
    };
    let single = usable < 2;
    Finding {
        health: if single { Health::Poor } else { Health::Good },
        what: "cores",
        found,
        advice: single.then(|| "ranks, their communication and checkpoints share one core: expect no overlap".into()),
    }
}

fn memory() -> Finding {
    let Some(free) = available_memory() else {
        return Finding { health: Health::Good, what: "memory", found: "unknown".into(), advice: None };
    };
    let small = free < 2 << 30;
    Finding {
        health: if small { Health::Poor } else { Health::Good },
        what: "memory",
        found: format!("{} available", bytes(free)),
        advice: small
            .then(|| "AdamW takes about 16 bytes a parameter, beside activations: keep to small models".into()),
    }
}

/// What the kernel calls available, or what the control group leaves if that is less.
fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let free = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10;
    let number = |name: &str| -> Option<u64> {
        fs::read_to_string(Path::new("/sys/fs/cgroup").join(name)).ok()?.trim().parse().ok()
    };
    let group = || {
        let version_2 = Some((number("memory.max")?, number("memory.current")?));
        version_2.map(|(limit, used)| limit.saturating_sub(used))
    };
    let older = || {
        let (limit, used) = (number("memory/memory.limit_in_bytes")?, number("memory/memory.usage_in_bytes")?);
        Some(limit.saturating_sub(used))
    };
    Some(group().or_else(older).map_or(free, |left| left.min(free)))
}

fn copy_speed() -> (f64, Finding) {
    let source = vec![1u8; PROBE];
    let mut target = vec![0u8; PROBE];
    let best = (0..5)
        .map(|_| {
            let start = Instant::now();
            target.copy_from_slice(black_box(&source));
            black_box(&target);
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    let speed = PROBE as f64 / best;
    let found = format!("{:.1} GB/s, one core, {}", speed / 1e9, bytes(PROBE as u64));
    (speed, Finding { health: Health::Good, what: "memory copy", found, advice: None })
}

/// How fast the host updates, over the link that this machine has, and which interval of ZenFlow would hide that.
fn host_update(copy: f64) -> Finding {
    match update_speed() {
        Ok(elements) => {
            // A gradient and a parameter of two bytes each; on a CPU the link is the memory itself.
            let (update, transfers) = (1e9 / elements, 4e9 / copy);
            let step = |interval: f64| (update + transfers) / interval;
            Finding {
                health: Health::Good,
                what: "host update",
                found: format!("{:.2} s a billion parameters (AdamW, one core), {transfers:.2} s to move them", update),
                advice: Some(format!(
                    "`offload.update_interval` = S hides both where a device step takes at least {:.2} s a billion parameters at S = \
                     4, {:.2} s at S = 8; \"auto\" finds S while running",
                    step(4.0),
                    step(8.0)
                )),
            }
        }
        Err(error) => Finding {
            health: Health::Poor,
            what: "host update",
            found: format!("not measured: {error:#}"),
            advice: None,
        },
    }
}

/// Elements a second that AdamW updates in host memory, on one core, with a rounded copy.
fn update_speed() -> anyhow::Result<f64> {
    const ELEMENTS: usize = 1 << 22;
    let rule = zf_optim::AdamWConfig::default().rule()?;
    let hyper = Hyper { lr: 1e-3, weight_decay: 0.1, count: 10, grad_scale: 1.0 };
    let grad = vec![1e-3f32; ELEMENTS];
    let [mut master, mut m, mut v] = [(); 3].map(|()| vec![1e-3f32; ELEMENTS]);
    let mut rounded = vec![half::bf16::ZERO; ELEMENTS];
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let start = Instant::now();
        let state = vec![&mut m[..], &mut v[..]];
        let (master, out) = (&mut master[..], Out::Bf16(&mut rounded));
        rule.apply(&mut HostSlice { master, grad: &grad, state, out, sums: &[], shape: &[] }, &hyper)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    black_box(&rounded);
    Ok(ELEMENTS as f64 / best)
}

/// Whether checkpoints can be written in `folder`: speed of a synced file, rename of folders, free space.
fn files(what: &'static str, folder: &Path) -> Finding {
    match probe(folder) {
        Ok((speed, free)) => {
            let full = free < 1 << 30;
            Finding {
                health: if full { Health::Poor } else { Health::Good },
                what,
                found: format!(
                    "{}: writes and syncs {:.0} MB/s, renames folders, {} free",
                    folder.display(),
                    speed / 1e6,
                    bytes(free)
                ),
                advice: full.then(|| "a checkpoint takes about 12 bytes a parameter: make room".into()),
            }
        }
        Err(error) => Finding {
            health: Health::Bad,
            what,
            found: error.to_string(),
            advice: Some(format!("{} must be a folder that can be written to", folder.display())),
        },
    }
}

/// Bytes a second of a synced file, and bytes free. Leaves nothing behind but the folder.
fn probe(folder: &Path) -> zf_core::Result<(f64, u64)> {
    let io = |error| zf_core::Error::io(folder, error);
    fs::create_dir_all(folder).map_err(io)?;
    let inside = tempfile::Builder::new().prefix(".zf-doctor-").tempdir_in(folder).map_err(io)?;
    let free = free_space(folder)?;
    // A quarter of what is free at most, so that the probe itself does no harm.
    let size = usize::try_from(free / 4).unwrap_or(PROBE).min(PROBE);
    let (partial, whole) = (inside.path().join("partial"), inside.path().join("whole"));
    fs::create_dir(&partial).map_err(io)?;
    let start = Instant::now();
    write_atomic(&partial.join("probe"), &vec![1u8; size])?;
    let speed = size as f64 / start.elapsed().as_secs_f64();
    rename_dir_synced(&partial, &whole)?;
    Ok((speed, free))
}

/// `$XDG_CACHE_HOME/zenflow`, or `~/.cache/zenflow`.
fn cache_folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")))?;
    Some(base.join("zenflow"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_what_works() {
        let folder = tempfile::tempdir().unwrap();
        let findings = [libtorch(), devices(), cores(), memory(), files("run folder", folder.path())];
        let mut out = Vec::new();
        report(&findings, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("ok    libtorch       2.11"), "{text}");
        assert!(text.contains("renames folders"), "{text}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "the probe leaves nothing");
    }

    #[test]
    fn a_folder_that_cannot_be_is_bad_and_has_advice() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let mut out = Vec::new();
        let error = report(&[files("run folder", &file.join("runs"))], &mut out).unwrap_err();
        assert_eq!(error.to_string(), "training would fail on this machine: run folder");
        assert!(String::from_utf8(out).unwrap().contains("-> "));
    }
}
