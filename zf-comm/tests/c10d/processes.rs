//! Ranks as processes: this test binary, started again for each.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, set_parent_process_death_signal};
use tempfile::TempDir;
use zf_comm::{C10d, C10dConfig};
use zf_core::stage::{Fabric, Transport};

/// What a rank does, and what it has to say about it.
pub(crate) type Scenario = fn(usize, Box<dyn Transport>) -> String;

/// A name by which a child finds its scenario.
pub(crate) type Named = (&'static str, Scenario);

const PATIENCE: Duration = Duration::from_secs(50);

/// Processes of one world. What is left of them is killed on drop.
pub(crate) struct Ranks {
    children: Vec<Option<Child>>,
    folder: TempDir,
}

impl Ranks {
    /// Starts `world` ranks over loopback.
    pub(crate) fn start(scenario: &str, world: usize, timeout: Duration) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port").port();
        Self::start_each(scenario, world, timeout, "127.0.0.1", port, |_| Vec::new())
    }

    /// Starts `world` ranks that meet at `host`, each by a command of its own (`prefix`).
    pub(crate) fn start_each(
        scenario: &str,
        world: usize,
        timeout: Duration,
        host: &str,
        port: u16,
        prefix: impl Fn(usize) -> Vec<String>,
    ) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the results");
        let program = std::env::current_exe().expect("a test has a binary").display().to_string();
        let children = (0..world).map(|rank| {
            let line: Vec<_> = prefix(rank).into_iter().chain([program.clone()]).collect();
            Command::new(&line[0])
                .args(&line[1..])
                .args(["rank_process", "--exact", "--nocapture", "--test-threads=1"])
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", world.to_string())
                .env("LOCAL_WORLD_SIZE", world.to_string())
                .env("MASTER_ADDR", host)
                .env("MASTER_PORT", port.to_string())
                .env("ZF_TEST_SCENARIO", scenario)
                .env("ZF_TEST_TIMEOUT", timeout.as_millis().to_string())
                .env("ZF_TEST_RESULT", folder.path().join(rank.to_string()))
                .env_remove("GLOO_SOCKET_IFNAME")
                .stdout(Stdio::null())
                .spawn()
                .expect("the binary starts again")
        });
        Self { children: children.map(Some).collect(), folder }
    }

    /// What a rank said, once it has ended by itself.
    pub(crate) fn result(&mut self, rank: usize) -> String {
        let mut child = self.children[rank].take().expect("a rank ends once");
        let begin = Instant::now();
        while child.try_wait().expect("it is our child").is_none() {
            if begin.elapsed() > PATIENCE {
                let _ = child.kill();
                panic!("rank {rank} has not ended within {PATIENCE:?}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let path = self.folder.path().join(rank.to_string());
        std::fs::read_to_string(&path).unwrap_or_else(|_| panic!("rank {rank} ended without a result"))
    }

    /// Those of several ranks.
    pub(crate) fn results(&mut self, ranks: impl IntoIterator<Item = usize>) -> Vec<String> {
        ranks.into_iter().map(|rank| self.result(rank)).collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// In a child: runs the scenario and writes down what it says. Elsewhere: nothing.
pub(crate) fn become_rank(scenarios: &[Named]) {
    let Ok(name) = std::env::var("ZF_TEST_SCENARIO") else { return };
    set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal that exists");
    let variable = |name: &str| std::env::var(name).expect("the parent sets it");
    let (_, scenario) = scenarios.iter().find(|(other, _)| *other == name).expect("the parent knows the names");
    let milliseconds = variable("ZF_TEST_TIMEOUT").parse().expect("a number");
    let config = C10dConfig { timeout: Duration::from_millis(milliseconds), ..C10dConfig::default() };
    let fabric = C10d::new(&config).expect("the parent sets all variables");
    let rank = fabric.local_ranks()[0];
    let said = match fabric.connect(rank) {
        Ok(transport) => scenario(rank, transport),
        Err(error) => format!("connect: {error}"),
    };
    let path = PathBuf::from(variable("ZF_TEST_RESULT"));
    std::fs::write(&path, said).expect("the parent made the folder");
}
