//! Which cores do what: one for each emulated device, the others for host work.
//!
//! Only cores that this process may use are given out, so that containers and batch systems stay in charge.
//!
//! ```
//! use zf_core::cores::{Core, split_of};
//!
//! // Two physical cores with two threads each.
//! let cores = [(0, 0), (1, 1), (2, 0), (3, 1)].map(|(id, physical)| Core { id, physical, node: 0 });
//! let split = split_of(&cores, 1, &[])?;
//! assert_eq!(split.device, [Some(0)]);
//! assert_eq!(split.host, [1, 3, 2]);
//! # Ok::<(), zf_core::Error>(())
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::{Error, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A core as the system numbers them; with simultaneous multithreading several share a physical one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Core {
    /// The system's number.
    pub id: usize,
    /// The same for cores that share a physical one.
    pub physical: usize,
    /// The NUMA node.
    pub node: usize,
}

/// Who uses which core.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cores {
    /// For each rank the core of its emulated device; none where there are too few.
    pub device: Vec<Option<usize>>,
    /// The cores of host work, those to use first first. Never empty.
    pub host: Vec<usize>,
}

/// Divides the cores of this process between so many emulated devices and the host.
///
/// # Errors
/// The system does not say which cores there are.
pub fn split(ranks: usize) -> Result<Cores> {
    split_of(&allowed()?, ranks, &[])
}

/// The same with the cores of host work given (`host.cores`), as long as there are any.
///
/// # Errors
/// As [`split`]; a core that this process may not use.
pub fn split_with(ranks: usize, host: &[usize]) -> Result<Cores> {
    split_of(&allowed()?, ranks, host)
}

/// The same for any machine.
///
/// Each rank gets a physical core of its own as long as there are enough; the host gets the rest, free physical cores
/// before siblings of those in use, and those of the devices' NUMA nodes before others. With fewer cores than ranks and
/// one for the host, devices are not bound to cores, and the host may use all.
///
/// # Errors
/// No cores; a core in `host` that is not among `cores`.
pub fn split_of(cores: &[Core], ranks: usize, host: &[usize]) -> Result<Cores> {
    if let Some(stranger) = host.iter().find(|&&id| cores.iter().all(|core| core.id != id)) {
        let ids: Vec<usize> = cores.iter().map(|core| core.id).collect();
        return Err(Error::Config(format!(
            "host.cores: expected cores that this process may use, which are {ids:?}, found {stranger}"
        )));
    }
    let order = physical_first(cores);
    if order.is_empty() {
        return Err(Error::Config("this process may use no core".into()));
    }
    let free: Vec<Core> = order.iter().copied().filter(|core| !host.contains(&core.id)).collect();
    let enough = if host.is_empty() { ranks < free.len() } else { ranks <= free.len() };
    let devices = &free[..if enough { ranks } else { 0 }];
    let device = (0..ranks).map(|rank| devices.get(rank).map(|core| core.id)).collect();
    if !host.is_empty() {
        return Ok(Cores { device, host: host.to_vec() });
    }
    let mut rest = free[devices.len()..].to_vec();
    // Stable: within each class the order remains.
    rest.sort_by_key(|core| {
        let shared = devices.iter().any(|device| device.physical == core.physical);
        let near = devices.is_empty() || devices.iter().any(|device| device.node == core.node);
        (shared, !near)
    });
    Ok(Cores { device, host: rest.iter().map(|core| core.id).collect() })
}

/// The cores that this process may use, in the order of their numbers.
///
/// # Errors
/// The system does not say.
pub fn allowed() -> Result<Vec<Core>> {
    let set = sched_getaffinity(None)
        .map_err(|error| Error::Config(format!("the system does not say which cores may be used: {error}")))?;
    let ids = (0..CpuSet::MAX_CPU).filter(|&id| set.is_set(id));
    Ok(topology(ids, Path::new("/sys/devices/system/cpu")))
}

/// Lets the calling thread run on these cores alone.
///
/// # Errors
/// Cores that do not exist or that this process may not use.
pub fn pin_current_thread(cores: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for &core in cores {
        if core >= CpuSet::MAX_CPU {
            return Err(Error::Config(format!("there is no core {core}")));
        }
        set.set(core);
    }
    sched_setaffinity(None, &set).map_err(|error| {
        Error::Config(format!(
            "cannot run on the cores {cores:?}: {error}; name cores that this process may use in `host.cores`"
        ))
    })
}

/// What the system's folder says about these cores. Where it says nothing, each is a physical one of node 0.
fn topology(ids: impl Iterator<Item = usize>, folder: &Path) -> Vec<Core> {
    let mut numbers = BTreeMap::new();
    ids.map(|id| {
        let cpu = folder.join(format!("cpu{id}"));
        let read = |name: &str| fs::read_to_string(cpu.join("topology").join(name)).ok()?.trim().parse::<i64>().ok();
        // Cores of different packages may have the same number.
        let key = match (read("physical_package_id"), read("core_id")) {
            (Some(package), Some(core)) => (package, core),
            _ => (-1, id as i64),
        };
        let next = numbers.len();
        Core { id, physical: *numbers.entry(key).or_insert(next), node: node(&cpu).unwrap_or(0) }
    })
    .collect()
}

/// The NUMA node of a core: the entry `nodeN` of its folder.
fn node(cpu: &Path) -> Option<usize> {
    let mut names = fs::read_dir(cpu).ok()?.flatten().map(|entry| entry.file_name());
    names.find_map(|name| name.to_str()?.strip_prefix("node")?.parse().ok())
}

/// First one thread of each physical core, node by node, then the second of each, and so on.
fn physical_first(cores: &[Core]) -> Vec<Core> {
    let mut seen = BTreeMap::new();
    let mut sorted = cores.to_vec();
    sorted.sort_by_key(|core| core.id);
    let mut ranked: Vec<(usize, Core)> = sorted
        .into_iter()
        .map(|core| {
            let count = seen.entry(core.physical).or_insert(0);
            *count += 1;
            (*count, core)
        })
        .collect();
    ranked.sort_by_key(|(sibling, core)| (*sibling, core.node, core.id));
    ranked.into_iter().map(|(_, core)| core).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores(list: &[(usize, usize, usize)]) -> Vec<Core> {
        list.iter().map(|&(id, physical, node)| Core { id, physical, node }).collect()
    }

    #[test]
    fn devices_get_physical_cores_and_the_host_the_rest() {
        // Two nodes of two physical cores with two threads each; siblings are numbered last.
        let machine = cores(&[(0, 0, 0), (1, 1, 0), (2, 2, 1), (3, 3, 1), (4, 0, 0), (5, 1, 0), (6, 2, 1), (7, 3, 1)]);
        let one = split_of(&machine, 1, &[]).unwrap();
        assert_eq!(one, Cores { device: vec![Some(0)], host: vec![1, 5, 2, 3, 6, 7, 4] });
        let four = split_of(&machine, 4, &[]).unwrap();
        assert_eq!(four.device, [Some(0), Some(1), Some(2), Some(3)]);
        assert_eq!(four.host, [4, 5, 6, 7]);
        let eight = split_of(&machine, 8, &[]).unwrap();
        assert_eq!(eight.device, [None; 8]);
        assert_eq!(eight.host, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn two_cores_are_one_device_and_its_host() {
        let machine = cores(&[(0, 0, 0), (1, 1, 0)]);
        assert_eq!(split_of(&machine, 1, &[]).unwrap(), Cores { device: vec![Some(0)], host: vec![1] });
        assert_eq!(split_of(&machine, 2, &[]).unwrap(), Cores { device: vec![None, None], host: vec![0, 1] });
        assert_eq!(split_of(&machine[1..], 1, &[]).unwrap(), Cores { device: vec![None], host: vec![1] });
        assert!(split_of(&[], 1, &[]).is_err());
    }

    #[test]
    fn given_host_cores_are_kept_from_devices() {
        let machine = cores(&[(0, 0, 0), (1, 1, 0), (4, 2, 0)]);
        assert_eq!(split_of(&machine, 1, &[0]).unwrap(), Cores { device: vec![Some(1)], host: vec![0] });
        assert_eq!(split_of(&machine, 2, &[0]).unwrap(), Cores { device: vec![Some(1), Some(4)], host: vec![0] });
        assert_eq!(split_of(&machine, 3, &[0]).unwrap().device, [None; 3]);
        let error = split_of(&machine, 1, &[2]).unwrap_err().to_string();
        assert!(error.contains("[0, 1, 4], found 2"), "{error}");
    }

    #[test]
    fn the_systems_folder_is_read() {
        let folder = tempfile::tempdir().unwrap();
        for (id, package, core, node) in [(0, 0, 0, 0), (1, 1, 0, 1), (2, 0, 0, 0)] {
            let cpu = folder.path().join(format!("cpu{id}"));
            fs::create_dir_all(cpu.join("topology")).unwrap();
            fs::create_dir(cpu.join(format!("node{node}"))).unwrap();
            fs::write(cpu.join("topology/physical_package_id"), format!("{package}\n")).unwrap();
            fs::write(cpu.join("topology/core_id"), format!("{core}\n")).unwrap();
        }
        // The last one is not described.
        let found = topology([0, 1, 2, 9].into_iter(), folder.path());
        assert_eq!(found, cores(&[(0, 0, 0), (1, 1, 1), (2, 0, 0), (9, 2, 0)]));
    }

    #[test]
    fn this_machines_cores_can_be_pinned_to() {
        let mine = allowed().unwrap();
        let split = split(1).unwrap();
        assert!(!split.host.is_empty());
        pin_current_thread(&split.host[..1]).unwrap();
        assert_eq!(allowed().unwrap().iter().map(|core| core.id).collect::<Vec<_>>(), split.host[..1]);
        pin_current_thread(&mine.iter().map(|core| core.id).collect::<Vec<_>>()).unwrap();
        assert!(pin_current_thread(&[]).is_err());
    }
}
