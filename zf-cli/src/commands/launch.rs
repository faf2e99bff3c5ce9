//! `zf launch`: local processes of one run, with the variables of `torchrun`.

use std::fmt;
use std::io::{BufRead, BufReader, Write, stderr};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process_group};
use zf_core::Error;

use crate::process;

const MOST: usize = 1024;
const POLL: Duration = Duration::from_millis(20);

/// Processes to be started on this machine.
#[derive(Debug, Clone)]
pub struct Launch {
    /// What each of them runs.
    pub program: PathBuf,
    /// With which arguments.
    pub arguments: Vec<String>,
    /// How many.
    pub processes: usize,
    /// How long the others may take to end by themselves after one has failed.
    pub grace: Duration,
}

/// A process that failed, the first one of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failed {
    /// Its rank.
    pub rank: usize,
    /// Its exit code, or 128 and the signal that killed it, as shells count.
    pub code: u8,
    /// The signal, if one killed it.
    pub signal: Option<i32>,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.signal {
            Some(signal) => write!(f, "rank {} was killed by signal {signal}", self.rank),
            None => write!(f, "rank {} ended with exit code {}", self.rank, self.code),
        }
    }
}

impl std::error::Error for Failed {}

/// Starts `processes` of this program with `arguments` and waits for them.
///
/// # Errors
/// As [`Launch::run`].
pub fn run(processes: usize, grace: Duration, arguments: Vec<String>) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("finding this program")?;
    Launch { program, arguments, processes, grace }.run()
}

impl Launch {
    /// Starts the processes and waits until all have ended. Rank 0 writes to this process's standard output and error;
    /// of the others the errors are shown, with their rank before each line. SIGINT, SIGTERM and SIGHUP are passed on to
    /// all. Once a process fails, the others have [`Launch::grace`] to end before they are killed. None outlives this
    /// process.
    ///
    /// Call it from the main thread: the processes are killed when the thread that started them ends.
    ///
    /// # Errors
    /// A number of processes that is not 1 to 1024, a program that does not start, or the first process that failed
    /// ([`Failed`]).
    pub fn run(&self) -> anyhow::Result<()> {
        if !(1..=MOST).contains(&self.processes) {
            return Err(Error::Config(format!("-n {}: expected 1 to {MOST} processes", self.processes)).into());
        }
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let port = free_port().context("finding a free port on 127.0.0.1")?;
        let mut ranks = Ranks::default();
        for rank in 0..self.processes {
            ranks.start(self.command(rank, port), rank)?;
        }
        let mut first: Option<(Failed, Instant)> = None;
        while ranks.alive() {
            for signal in signals.pending() {
                ranks.send(signal);
            }
            for (rank, status) in ranks.ended()? {
                if let (None, Some(failed)) = (&first, Failed::of(rank, status)) {
                    if self.processes > 1 && failed.code != 130 {
                        let _ = writeln!(stderr(), "{failed}; the others are given {:?} to end", self.grace);
                    }
                    first = Some((failed, Instant::now()));
                }
            }
            if first.is_some_and(|(_, since)| since.elapsed() > self.grace) {
                ranks.kill();
            }
            std::thread::sleep(POLL);
        }
        first.map_or(Ok(()), |(failed, _)| Err(failed.into()))
    }

    fn command(&self, rank: usize, port: u16) -> Command {
        let mut command = Command::new(&self.program);
        let (rank_text, world) = (rank.to_string(), self.processes.to_string());
        command.args(&self.arguments);
        for (name, value) in [("RANK", &rank_text), ("LOCAL_RANK", &rank_text), ("WORLD_SIZE", &world)] {
            command.env(name, value);
        }
        command.env("LOCAL_WORLD_SIZE", &world).env("GROUP_RANK", "0");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        // Those of a launcher around this one would speak of its store.
        for name in ["TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"] {
            command.env_remove(name);
        }
        // The terminal's signals come here alone and are passed on once.
        command.stdin(Stdio::null());
        if rank > 0 {
            command.stdout(Stdio::null()).stderr(Stdio::piped());
        }
        process::tie(&mut command, Signal::KILL);
        command
    }
}

impl Failed {
    fn of(rank: usize, status: ExitStatus) -> Option<Self> {
        let code = |code: i32| u8::try_from(code).unwrap_or(1);
        match (status.code(), status.signal()) {
            (Some(0), _) => None,
            (Some(other), _) => Some(Self { rank, code: code(other), signal: None }),
            (None, signal) => Some(Self { rank, code: code(128 + signal.unwrap_or(0)), signal }),
        }
    }
}

/// A port that nobody listens on at this moment.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// The processes that are running; killed on drop.
#[derive(Default)]
struct Ranks(Vec<Process>);

struct Process {
    rank: usize,
    child: Child,
    /// Passes its errors on.
    reader: Option<JoinHandle<()>>,
}

impl Ranks {
    fn start(&mut self, mut command: Command, rank: usize) -> anyhow::Result<()> {
        let mut child = command.spawn().with_context(|| format!("starting rank {rank}"))?;
        let errors = child.stderr.take();
        self.0.push(Process { rank, child, reader: None });
        if let (Some(errors), Some(process)) = (errors, self.0.last_mut()) {
            let reader = std::thread::Builder::new().spawn(move || pass_on(rank, BufReader::new(errors)))?;
            process.reader = Some(reader);
        }
        Ok(())
    }

    fn alive(&self) -> bool {
        !self.0.is_empty()
    }

    /// Those that have ended since the last call.
    fn ended(&mut self) -> std::io::Result<Vec<(usize, ExitStatus)>> {
        let mut ended = Vec::new();
        let mut at = 0;
        while at < self.0.len() {
            match self.0[at].child.try_wait()? {
                None => at += 1,
                Some(status) => {
                    let mut process = self.0.remove(at);
                    process.read_out();
                    ended.push((process.rank, status));
                }
            }
        }
        Ok(ended)
    }

    fn send(&self, signal: i32) {
        self.0.iter().for_each(|process| process::pass_on(signal, &process.child));
    }

    /// Kills them with whatever they have started: each leads a process group.
    fn kill(&mut self) {
        for process in &mut self.0 {
            if kill_process_group(Pid::from_child(&process.child), Signal::KILL).is_err() {
                let _ = process.child.kill();
            }
        }
    }
}

impl Process {
    /// Waits until what it wrote has been passed on; not for a process of its own that goes on writing.
    fn read_out(&mut self) {
        let begin = Instant::now();
        if let Some(reader) = self.reader.take() {
            while !reader.is_finished() && begin.elapsed() < Duration::from_secs(1) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
        for process in &mut self.0 {
            let _ = process.child.wait();
            process.read_out();
        }
    }
}

/// Writes each line with its rank before it, whole.
fn pass_on(rank: usize, mut from: impl BufRead) {
    let mut line = Vec::new();
    loop {
        line.clear();
        line.extend_from_slice(format!("[rank {rank}] ").as_bytes());
        match from.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) if line.last() != Some(&b'\n') => line.push(b'\n'),
            Ok(_) => {}
        }
        let _ = stderr().lock().write_all(&line);
    }
}
