//! Running rows: each in a folder of its own, with the real program, a bounded time and the same rules for all.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use zf_tests::golden;

use crate::lifecycle::program;

/// The longest a row may take. A run that was wrongly accepted ends here.
const LIMIT: Duration = Duration::from_secs(60);
/// Place, quoted line, caret line, and as many to spare: an error is read at a glance. Empty lines do not count.
const LINES: usize = 6;
const WORKERS: usize = 2;

/// The command of most rows.
pub(crate) const TRAIN: &str = "train run.toml --out new";

/// One broken thing, and how it is to be refused.
pub(crate) struct Row<'a> {
    name: String,
    make: Box<dyn Fn(&Place) + Send + Sync + 'a>,
    command: Vec<String>,
    code: i32,
    says: Vec<String>,
}

/// The folder of a row, which is the program's current folder.
pub(crate) struct Place(PathBuf);

/// What the program did.
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl<'a> Row<'a> {
    /// A row of `zf` with the words of `command`, refused with exit code 2 and everything that `says` lists.
    pub(crate) fn new(name: &str, command: &str, says: &[&str], make: impl Fn(&Place) + Send + Sync + 'a) -> Self {
        Self {
            name: name.to_owned(),
            make: Box::new(make),
            command: command.split_whitespace().map(str::to_owned).collect(),
            code: 2,
            says: says.iter().map(|&text| text.to_owned()).collect(),
        }
    }

    /// The command on the unbroken thing, which must work, and what it prints.
    pub(crate) fn works(name: &str, command: &str, says: &[&str], make: impl Fn(&Place) + Send + Sync + 'a) -> Self {
        Self { code: 0, ..Self::new(name, command, says, make) }
    }

    /// One more word of the command, spaces and all.
    pub(crate) fn arg(mut self, word: &str) -> Self {
        self.command.push(word.to_owned());
        self
    }
}

impl Place {
    /// A path within the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file, and the folders above it.
    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a file lies in a folder")).expect("the folder of a row");
        fs::write(path, contents).expect("a file of a row");
    }

    /// A run file that works when nothing else is said: one step of the tiny Llama on the reference tokens.
    pub(crate) fn base(&self) {
        self.write("base.toml", base());
    }

    /// `run.toml`: the working run with `text` over it, from line 2 on.
    pub(crate) fn run(&self, text: &str) {
        self.base();
        self.write("run.toml", format!("extends = \"base.toml\"\n{text}\n"));
    }

    /// Lays `text` over the working run file, under its own name.
    pub(crate) fn run_over(&self, text: &str) {
        self.write("below.toml", base());
        self.write("base.toml", format!("extends = \"below.toml\"\n{text}\n"));
    }

    /// Copies a folder of the repository or of another test, all files deep.
    pub(crate) fn copy(&self, from: &Path, name: &str) {
        fn walk(from: &Path, to: &Path) -> std::io::Result<()> {
            fs::create_dir_all(to)?;
            for entry in fs::read_dir(from)? {
                let entry = entry?;
                let target = to.join(entry.file_name());
                if entry.file_type()?.is_dir() {
                    walk(&entry.path(), &target)?;
                } else {
                    fs::copy(entry.path(), target)?;
                }
            }
            Ok(())
        }
        walk(from, &self.path(name)).expect("a copy of a folder");
    }
}

/// A run file of the working run with `text` over it, which begins on line 2, refused by [`TRAIN`].
pub(crate) fn file<'a>(name: &str, text: &'a str, says: &[&str]) -> Row<'a> {
    Row::new(name, TRAIN, says, move |place| place.run(text))
}

/// The text of the run file that works.
pub(crate) fn base() -> String {
    format!(
        "[model]\npath = {:?}\n[data]\npath = {:?}\nsequence_length = 32\n[run]\nsteps = 1\nglobal_batch = 4\n\
         micro_batch = 2\ncheckpoint = {{ best = false }}\n[transport]\nranks = 2\ntimeout = \"20s\"\n\
         [log]\ntensorboard = false\ntrace = false\n",
        golden("tiny-llama"),
        golden("tokens.bin")
    )
}

/// Runs all rows, two at a time, and fails with every row that went wrong.
///
/// # Panics
/// When a row is not refused as it says.
pub(crate) fn check(rows: &[Row<'_>]) {
    let mut names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), rows.len(), "two rows of one name");
    let next = AtomicUsize::new(0);
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                while let Some(row) = rows.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(what) = one(row) {
                        wrong.lock().expect("no row panics").push(what);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().expect("no row panics");
    assert!(wrong.is_empty(), "{} of {} rows:\n\n{}", wrong.len(), rows.len(), wrong.join("\n\n"));
}

/// Runs the program in `folder`, to be trusted with a working command.
///
/// # Panics
/// When it fails.
pub(crate) fn run_well(folder: &Path, command: &[&str]) {
    let words: Vec<String> = command.iter().map(|&word| word.to_owned()).collect();
    let ended = start(folder, &words).expect("the program starts and ends");
    assert_eq!(ended.code, Some(0), "zf {}: {}", words.join(" "), ended.stderr);
}

fn one(row: &Row<'_>) -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let place = Place(folder.path().to_path_buf());
    (row.make)(&place);
    let shown = format!("{}: zf {}", row.name, row.command.join(" "));
    let ended = start(&place.0, &row.command).map_err(|what| format!("{shown}\n{what}"))?;
    let mut faults = Vec::new();
    if ended.code != Some(row.code) {
        faults.push(format!("exit code {:?}, expected {}", ended.code, row.code));
    }
    let spoken = if row.code == 0 { &ended.stdout } else { &ended.stderr };
    faults.extend(row.says.iter().filter(|text| !spoken.contains(*text)).map(|text| format!("does not say: {text}")));
    if row.code != 0 {
        faults.extend(refused_badly(&place, row.command[0] == "inspect", &ended));
    }
    if faults.is_empty() {
        return Ok(());
    }
    Err(format!("{shown}\n  {}\n--- stderr\n{}--- stdout\n{}", faults.join("\n  "), ended.stderr, ended.stdout))
}

/// The rules that hold for every refusal.
fn refused_badly(place: &Place, inspects: bool, ended: &Ended) -> Vec<String> {
    let mut faults = Vec::new();
    if ended.stderr.lines().filter(|line| !line.trim().is_empty()).count() > LINES {
        faults.push(format!("more than {LINES} lines of error"));
    }
    if !ended.stderr.starts_with("error: ") {
        faults.push("the error does not begin with `error: `".to_owned());
    }
    for trace in ["panicked", "stack backtrace", "RUST_BACKTRACE", "Exception raised from", "frame #"] {
        if ended.stderr.contains(trace) {
            faults.push(format!("shows `{trace}`"));
        }
    }
    // What a damaged checkpoint holds may be shown, if nothing says that it is whole.
    let shown = ended.stdout.trim();
    if !shown.is_empty() && (!inspects || shown.contains("whole")) {
        faults.push("prints results".to_owned());
    }
    let saved = fs::read_dir(place.path("new/checkpoints")).into_iter().flatten().flatten();
    if let Some(entry) = saved.into_iter().next() {
        faults.push(format!("leaves {} behind", entry.path().display()));
    }
    faults
}

fn start(folder: &Path, command: &[String]) -> Result<Ended, String> {
    // Files, not pipes: nobody has to read while the program writes.
    let (out, err) = (folder.join(".stdout"), folder.join(".stderr"));
    let file = |path: &Path| File::create(path).map_err(|error| error.to_string());
    let program = program();
    let mut child = Command::new(&program)
        .args(command)
        .current_dir(folder)
        .env("XDG_CACHE_HOME", folder.join(".cache"))
        .env("RUST_BACKTRACE", "1")
        .env_remove("ZF_LOG")
        .stdin(Stdio::null())
        .stdout(file(&out)?)
        .stderr(file(&err)?)
        .spawn()
        .map_err(|error| format!("{} does not start: {error}", program.display()))?;
    let started = Instant::now();
    let code = loop {
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            break status.code();
        }
        if started.elapsed() > LIMIT {
            let _ = child.kill();
            let _ = child.wait();
            let said = fs::read_to_string(&err).unwrap_or_default();
            return Err(format!("still running after {} seconds\n{said}", LIMIT.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let read =
        |path: &Path| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    Ok(Ended { code, stdout: read(&out), stderr: read(&err) })
}
