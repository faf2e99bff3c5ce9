//! Who this process is among the others, from the variables of the program that started it.

/// A process's place in the world, and where the world meets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendezvous {
    /// This process's rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Number of this rank among those of its machine, where the launcher tells.
    pub local_rank: Option<usize>,
    /// Number of ranks of a machine, where the launcher tells and it is the same on all.
    pub local_world: Option<usize>,
    /// Host of the store.
    pub host: String,
    /// Port of the store.
    pub port: u16,
    /// Whether the launcher itself hosts the store (`torchrun` does), so that rank 0 must not.
    pub hosted_by_launcher: bool,
    /// What keeps the keys of one start apart from those of a restart.
    pub attempt: String,
}

/// Variables and their meaning differ between launchers.
struct Names {
    launcher: &'static str,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static [&'static str],
    local_world: &'static [&'static str],
}

const TORCHRUN: Names = Names {
    launcher: "torchrun",
    rank: "RANK",
    world: "WORLD_SIZE",
    local_rank: &["LOCAL_RANK"],
    local_world: &["LOCAL_WORLD_SIZE"],
};

const OPEN_MPI: Names = Names {
    launcher: "mpirun",
    rank: "OMPI_COMM_WORLD_RANK",
    world: "OMPI_COMM_WORLD_SIZE",
    local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
    local_world: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
};

const SRUN: Names = Names {
    launcher: "srun",
    rank: "SLURM_PROCID",
    world: "SLURM_NTASKS",
    local_rank: &["SLURM_LOCALID"],
    local_world: &["SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"],
};

const MPICH: Names = Names {
    launcher: "mpirun",
    rank: "PMI_RANK",
    world: "PMI_SIZE",
    local_rank: &["MPI_LOCALRANKID"],
    local_world: &["MPI_LOCALNRANKS"],
};

impl Rendezvous {
    /// Reads the variables of `torchrun` (and `zf launch`), Open MPI's and MPICH's `mpirun`, and `srun`, in this order.
    /// `address` (`host:port`) takes the place of `MASTER_ADDR` and `MASTER_PORT`.
    ///
    /// # Errors
    /// No launcher's variables, or which of them is missing or no number.
    pub fn from_variables(get: impl Fn(&str) -> Option<String>, address: Option<&str>) -> Result<Self, String> {
        let get = |name: &str| get(name).filter(|value| !value.trim().is_empty());
        let names = launcher(&get)?;
        let rank = number(&get, names, names.rank)?;
        let world = number(&get, names, names.world)?;
        if rank >= world {
            return Err(format!("{} = {rank}, but {} = {world}; expected a smaller rank", names.rank, names.world));
        }
        let first =
            |list: &[&str], parse: fn(&str) -> Option<usize>| list.iter().find_map(|name| parse(get(name)?.trim()));
        let local_world = first(names.local_world, tasks_per_node).filter(|count| (1..=world).contains(count));
        let (host, port) = match address {
            Some(address) => split(address)?,
            None => (host(&get, names, world, local_world)?, port(&get, names)?),
        };
        let attempt = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_STEP_ID"];
        Ok(Self {
            rank,
            world,
            local_rank: first(names.local_rank, |text| text.parse().ok()),
            local_world,
            host,
            port,
            hosted_by_launcher: get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True"),
            attempt: attempt.iter().filter_map(|name| get(name)).collect::<Vec<_>>().join("/"),
        })
    }
}

fn launcher(get: &impl Fn(&str) -> Option<String>) -> Result<&'static Names, String> {
    let has = |names: &Names| get(names.rank).is_some();
    if has(&TORCHRUN) {
        return Ok(&TORCHRUN);
    }
    if has(&OPEN_MPI) {
        return Ok(&OPEN_MPI);
    }
    // `srun` may offer PMI beside its own variables; an `mpirun` within a job step finds those of the step.
    let both = get(MPICH.rank) == get(SRUN.rank) && get(MPICH.world) == get(SRUN.world);
    if has(&MPICH) && !both {
        return Ok(&MPICH);
    }
    if has(&SRUN) {
        return Ok(&SRUN);
    }
    Err("no launcher started this process: none of RANK, OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID is set; start \
         it with `zf launch -n 2 -- train ...`, torchrun, mpirun or srun"
        .into())
}

fn number(get: &impl Fn(&str) -> Option<String>, names: &Names, name: &str) -> Result<usize, String> {
    let value = get(name).ok_or_else(|| missing(names, name, ""))?;
    value.trim().parse().map_err(|_| format!("{name} = {value:?}; expected a number"))
}

fn missing(names: &Names, name: &str, hint: &str) -> String {
    format!("{name} is not set, but {} is, as {} does{hint}", names.rank, names.launcher)
}

/// The host of rank 0.
fn host(
    get: &impl Fn(&str) -> Option<String>,
    names: &Names,
    world: usize,
    local_world: Option<usize>,
) -> Result<String, String> {
    if let Some(host) = get("MASTER_ADDR") {
        return Ok(host.trim().to_owned());
    }
    if names.rank == SRUN.rank {
        let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
        let list = lists.iter().find_map(|name| get(name));
        return list.and_then(|list| first_host(&list)).ok_or_else(|| {
            missing(names, "MASTER_ADDR", ", and SLURM_STEP_NODELIST names no host to take in its place")
        });
    }
    if names.rank != TORCHRUN.rank && local_world == Some(world) {
        return Ok("127.0.0.1".into());
    }
    Err(missing(names, "MASTER_ADDR", "; set it to the host of rank 0"))
}

fn port(get: &impl Fn(&str) -> Option<String>, names: &Names) -> Result<u16, String> {
    if let Some(value) = get("MASTER_PORT") {
        let port = value.trim().parse().ok().filter(|port| *port > 0);
        return port.ok_or_else(|| format!("MASTER_PORT = {value:?}; expected a port from 1 to 65535"));
    }
    // Steps of a job get ports of their own below the range from which systems give out ports.
    let id = |name: &str| get(name)?.trim().parse::<u64>().ok();
    match id("SLURM_JOB_ID").or_else(|| id("SLURM_JOBID")).filter(|_| names.rank == SRUN.rank) {
        Some(job) => Ok(15_000 + ((job * 16 + id("SLURM_STEP_ID").unwrap_or(0) % 16) % 15_000) as u16),
        None => Err(missing(names, "MASTER_PORT", "; set it to a free port on the host of rank 0")),
    }
}

/// `host:port`, or `[v6 address]:port`.
pub(crate) fn split(address: &str) -> Result<(String, u16), String> {
    let parts = address.rsplit_once(':').and_then(|(host, port)| {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Some((host.to_owned(), port.parse().ok().filter(|port| *port > 0)?))
    });
    parts.filter(|(host, _)| !host.is_empty()).ok_or_else(|| format!("expected \"host:port\", found {address:?}"))
}

/// The first host of a list as Slurm writes it: `gpu[003-005,9],login` begins with `gpu003`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find([',', '[']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        if !rest[end..].starts_with('[') {
            return (!host.is_empty()).then_some(host);
        }
        let close = end + rest[end..].find(']')?;
        let range = &rest[end + 1..close];
        host.push_str(range.split([',', '-']).next()?);
        rest = &rest[close + 1..];
    }
}

/// `4`, or `4(x2)` where every machine has as many.
fn tasks_per_node(text: &str) -> Option<usize> {
    let (count, rest) = text.split_once('(').unwrap_or((text, ""));
    let uniform = rest.is_empty() || (rest.starts_with('x') && rest.ends_with(')') && !rest.contains(','));
    count.parse().ok().filter(|_| uniform)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Rendezvous, String> {
        let get = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Rendezvous::from_variables(get, None)
    }

    fn place(found: &Rendezvous) -> (usize, usize, Option<usize>, Option<usize>, &str, u16) {
        (found.rank, found.world, found.local_rank, found.local_world, &found.host, found.port)
    }

    const TORCHRUN: [(&str, &str); 6] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn torchrun() {
        let found = read(&TORCHRUN).expect("all are set");
        assert_eq!(place(&found), (3, 4, Some(1), Some(2), "node0", 29500));
        assert!(!found.hosted_by_launcher);
        let elastic = [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RESTART_COUNT", "2")];
        let found = read(&[&TORCHRUN[..], &elastic].concat()).expect("all are set");
        assert!(found.hosted_by_launcher);
        assert_eq!(found.attempt, "2");
        for missing in ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            let rest: Vec<_> = TORCHRUN.into_iter().filter(|(name, _)| *name != missing).collect();
            let error = read(&rest).expect_err(missing);
            assert!(error.starts_with(&format!("{missing} is not set, but RANK is, as torchrun does")), "{error}");
        }
    }

    #[test]
    fn srun_names_hosts_and_jobs() {
        let variables = [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
            ("SLURM_STEP_NODELIST", "gpu[003-005,9],login"),
            ("SLURM_JOB_ID", "1234"),
            // What PMI offers is the same.
            ("PMI_RANK", "5"),
            ("PMI_SIZE", "8"),
        ];
        let found = read(&variables).expect("all are set");
        assert_eq!(place(&found), (5, 8, Some(1), Some(4), "gpu003", 15_000 + (1234 * 16) % 15_000));
        let step = [&variables[..], &[("SLURM_STEP_ID", "3")]].concat();
        assert_eq!(read(&step).expect("all are set").port, found.port + 3);
        let master = [&variables[..], &[("MASTER_ADDR", "a"), ("MASTER_PORT", "77")]].concat();
        assert_eq!(place(&read(&master).expect("all are set")).4, "a");
        let no_job: Vec<_> = variables.into_iter().filter(|(name, _)| *name != "SLURM_JOB_ID").collect();
        assert!(read(&no_job).expect_err("no port").contains("MASTER_PORT is not set, but SLURM_PROCID is"));
        let no_host: Vec<_> = variables.into_iter().filter(|(name, _)| *name != "SLURM_STEP_NODELIST").collect();
        assert!(read(&no_host).expect_err("no host").contains("MASTER_ADDR is not set"));
    }

    #[test]
    fn mpirun_of_both_kinds() {
        let open = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("MASTER_PORT", "5000"),
            // A job step around it.
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
        ];
        // All ranks on one machine need no address.
        assert_eq!(place(&read(&open).expect("all are set")), (1, 2, Some(1), Some(2), "127.0.0.1", 5000));
        let error = read(&open[..4]).expect_err("no port");
        assert!(error.contains("MASTER_PORT is not set, but OMPI_COMM_WORLD_RANK is, as mpirun does"), "{error}");
        let mpich = [
            ("PMI_RANK", "2"),
            ("PMI_SIZE", "3"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "5000"),
        ];
        assert_eq!(place(&read(&mpich).expect("all are set")), (2, 3, None, None, "10.0.0.1", 5000));
        assert!(read(&mpich[..2]).expect_err("no address").contains("MASTER_ADDR is not set, but PMI_RANK is"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = read(&[]).expect_err("nothing is set");
        assert!(error.contains("zf launch -n 2"), "{error}");
        let with = |name: &str, value: &'static str| {
            let changed: Vec<_> =
                TORCHRUN.into_iter().map(|(key, old)| (key, if key == name { value } else { old })).collect();
            read(&changed).expect_err(name)
        };
        assert_eq!(with("RANK", "x"), "RANK = \"x\"; expected a number");
        assert_eq!(with("RANK", "4"), "RANK = 4, but WORLD_SIZE = 4; expected a smaller rank");
        assert_eq!(with("MASTER_PORT", "0"), "MASTER_PORT = \"0\"; expected a port from 1 to 65535");
    }

    #[test]
    fn texts_of_slurm() {
        for (list, first) in
            [("n1", "n1"), ("n1,n2", "n1"), ("n[07-11]", "n07"), ("r[1-2]n[3,5]", "r1n3"), ("a[1]-ib,b", "a1-ib")]
        {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        assert_eq!(first_host(""), None);
        assert_eq!(first_host("a[1"), None);
        for (text, count) in [("4", Some(4)), ("4(x2)", Some(4)), ("4(x2),3", None), ("2,1", None)] {
            assert_eq!(tasks_per_node(text), count, "{text}");
        }
    }

    #[test]
    fn addresses() {
        assert_eq!(split("[::1]:80"), Ok(("::1".into(), 80)));
        assert_eq!(split("host:80"), Ok(("host".into(), 80)));
        for wrong in ["host", ":80", "host:0", "host:x"] {
            assert!(split(wrong).is_err(), "{wrong}");
        }
    }
}
