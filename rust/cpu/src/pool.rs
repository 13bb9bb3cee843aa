//! Threads that share a job's tasks: they spin briefly between jobs, then park.
//!
//! Tasks are claimed one by one, so a thread that loses its core delays a job by one task at most:
//! in ascending order by all threads (`run`), or, where what follows in memory should be fetched by
//! who will use it, each thread in a range of its own and then in the others' (`run_in_ranges`). The
//! calling thread takes part. Which thread computes a task never changes its result.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long an idle thread spins before it parks: longer than the serial parts of a step.
const SPIN: Duration = Duration::from_micros(60);
/// Spins of the caller before it yields its core to a helper that may be waiting for one.
const CALLER_SPINS: u32 = 512;

/// A job: a function of task and thread number, alive until its last task is done.
type Job = *const (dyn Fn(usize, usize) + Sync);

/// Tasks not yet claimed: the first (upper half) and the one after the last (lower half). A cache
/// line of its own (and the one fetched with it), as each thread claims mostly from its own range.
#[repr(align(128))]
struct TaskRange(AtomicU64);

impl TaskRange {
    fn offer(&self, tasks: Range<usize>) {
        self.0.store((tasks.start as u64) << 32 | tasks.end as u64, Ordering::SeqCst);
    }

    fn is_empty(&self) -> bool {
        let tasks = self.0.load(Ordering::SeqCst);
        tasks >> 32 >= u64::from(tasks as u32)
    }

    /// Take the first task.
    fn claim(&self) -> Option<usize> {
        let next = |tasks: u64| (tasks >> 32 < u64::from(tasks as u32)).then(|| tasks + (1 << 32));
        let claimed = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        claimed.ok().map(|tasks| (tasks >> 32) as usize)
    }
}

struct Shared {
    ranges: Vec<TaskRange>, // by thread
    job: std::cell::UnsafeCell<Option<Job>>,
    done: AtomicUsize,
    panicked: AtomicBool,
    closing: AtomicBool,
    parked: Vec<AtomicBool>,
}

// SAFETY: `job` is written by the caller while no task of the last job is unclaimed or running, and
// read only by threads that have claimed a task of the present one, which lasts until that is done.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is used only as said above.
unsafe impl Send for Shared {}

impl Shared {
    /// Take a task, of one's own range while it has one.
    fn claim(&self, thread: usize) -> Option<usize> {
        let (others, own) = self.ranges.split_at(thread);
        own.iter().chain(others).find_map(TaskRange::claim)
    }

    /// Claim and run tasks of the present job until none is left; whether there was one.
    fn work(&self, thread: usize) -> bool {
        let mut num_done = 0;
        while let Some(task) = self.claim(thread) {
            // SAFETY: a task is claimed and not counted as done: the caller is still in `run` and
            // keeps the job and what it borrows alive.
            let run = unsafe { &*(*self.job.get()).expect("set before the tasks were offered") };
            if catch_unwind(AssertUnwindSafe(|| run(task, thread))).is_err() {
                self.panicked.store(true, Ordering::SeqCst);
            }
            num_done += 1;
        }
        if num_done > 0 {
            self.done.fetch_add(num_done, Ordering::SeqCst);
        }
        num_done > 0
    }

    fn serve(&self, thread: usize) {
        loop {
            let mut idle_since = Instant::now();
            let mut spins = 0_u32;
            while !self.closing.load(Ordering::SeqCst) {
                if self.work(thread) {
                    idle_since = Instant::now();
                }
                spins += 1;
                if spins.is_multiple_of(64) && idle_since.elapsed() > SPIN {
                    break;
                }
                std::hint::spin_loop();
            }
            if self.closing.load(Ordering::SeqCst) {
                return;
            }
            let parked = &self.parked[thread - 1];
            parked.store(true, Ordering::SeqCst);
            // Whoever offers tasks after this looks at `parked`; what was offered before is seen.
            let is_idle = self.ranges.iter().all(TaskRange::is_empty);
            if is_idle && !self.closing.load(Ordering::SeqCst) {
                std::thread::park();
            }
            parked.store(false, Ordering::SeqCst);
        }
    }
}

/// The threads.
pub struct ThreadPool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    threads: Vec<Thread>,
    running: Mutex<()>,
}

impl ThreadPool {
    /// Start a pool of `num_threads`, the callers' own included.
    pub fn new(num_threads: usize) -> ThreadPool {
        let num_helpers = num_threads.max(1) - 1;
        let shared = Arc::new(Shared {
            ranges: (0..=num_helpers).map(|_| TaskRange(AtomicU64::new(0))).collect(),
            job: std::cell::UnsafeCell::new(None),
            done: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            parked: (0..num_helpers).map(|_| AtomicBool::new(false)).collect(),
        });
        let helpers: Vec<JoinHandle<()>> = (1..=num_helpers)
            .map(|thread| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("cpu-kernels-{thread}"))
                    .spawn(move || shared.serve(thread))
                    .expect("the system refuses another thread")
            })
            .collect();
        let threads = helpers.iter().map(|helper| helper.thread().clone()).collect();
        ThreadPool { shared, helpers, threads, running: Mutex::new(()) }
    }

    /// Threads that this process may run at once: its affinity mask and its cgroup's quota.
    pub fn available_threads() -> usize {
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
    }

    /// How many threads share the tasks.
    pub fn num_threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Run `run(task, thread)` for every task in `0..num_tasks`; return when all are done.
    ///
    /// # Panics
    /// If a task panicked; the pool stays usable.
    pub fn run(&self, num_tasks: usize, run: impl Fn(usize, usize) + Sync) {
        self.run_cut(num_tasks, num_tasks, &run);
    }

    /// As `run`, but by the caller alone where the work is so little that sharing it costs more.
    pub(crate) fn run_shared(
        &self,
        is_worth_sharing: bool,
        num_tasks: usize,
        run: impl Fn(usize, usize) + Sync,
    ) {
        if is_worth_sharing {
            self.run(num_tasks, run);
        } else {
            (0..num_tasks).for_each(|task| run(task, 0));
        }
    }

    /// As `run`, each thread beginning with a range of consecutive tasks of its own.
    pub(crate) fn run_in_ranges(&self, num_tasks: usize, run: impl Fn(usize, usize) + Sync) {
        self.run_cut(num_tasks, num_tasks.div_ceil(self.num_threads()), &run);
    }

    fn run_cut(&self, num_tasks: usize, range: usize, run: &(dyn Fn(usize, usize) + Sync)) {
        if num_tasks <= 1 || self.helpers.is_empty() {
            (0..num_tasks).for_each(|task| run(task, 0));
            return;
        }
        let turn = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        self.offer(num_tasks, range, run);
        self.shared.work(0);
        self.wait(num_tasks);
        let panicked = self.shared.panicked.swap(false, Ordering::SeqCst);
        drop(turn);
        assert!(!panicked, "a kernel panicked: broken invariant");
    }

    fn offer(&self, num_tasks: usize, range: usize, run: &(dyn Fn(usize, usize) + Sync)) {
        #[expect(clippy::transmute_ptr_to_ptr, reason = "a cast cannot change the lifetime")]
        // SAFETY: only the lifetime is erased; `run` returns when no thread uses the job any more.
        let run = unsafe {
            std::mem::transmute::<
                *const (dyn Fn(usize, usize) + Sync + '_),
                *const (dyn Fn(usize, usize) + Sync + 'static),
            >(run)
        };
        self.shared.done.store(0, Ordering::SeqCst);
        // SAFETY: the last job's tasks are all done and none is on offer, so nobody reads it.
        unsafe { *self.shared.job.get() = Some(run) };
        // The caller's own range last: a helper that is awake finds its own first.
        for (thread, tasks) in self.shared.ranges.iter().enumerate().rev() {
            let start = (thread * range).min(num_tasks);
            tasks.offer(start..(start + range).min(num_tasks));
        }
        for (parked, thread) in self.shared.parked.iter().zip(&self.threads) {
            if parked.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
    }

    fn wait(&self, num_tasks: usize) {
        let mut spins = 0;
        while self.shared.done.load(Ordering::SeqCst) < num_tasks {
            if spins < CALLER_SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // A helper never panics: tasks are caught.
            let _ = helper.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_whatever_the_number_of_threads() {
        for num_threads in [1, 2, 3, 8] {
            let pool = ThreadPool::new(num_threads);
            for round in 0..300 {
                let num_tasks = round % 37;
                let counts: Vec<AtomicUsize> =
                    (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
                let count = |task: usize, thread: usize| {
                    assert!(thread < num_threads);
                    counts[task].fetch_add(1, Ordering::SeqCst);
                };
                pool.run(num_tasks, count);
                assert!(counts.iter().all(|count| count.load(Ordering::SeqCst) == 1));
                pool.run_in_ranges(num_tasks, count);
                assert!(counts.iter().all(|count| count.load(Ordering::SeqCst) == 2));
                if round % 50 == 0 {
                    std::thread::sleep(Duration::from_millis(2)); // let the helpers park
                }
            }
        }
    }

    #[test]
    fn a_thread_that_stands_still_holds_up_one_task_only() {
        let pool = ThreadPool::new(2);
        for stalled in [0, 4, 5, 9] {
            let others = AtomicUsize::new(0);
            let since = Instant::now();
            pool.run_in_ranges(10, |task, _| {
                if task != stalled {
                    others.fetch_add(1, Ordering::SeqCst);
                }
                while task == stalled && others.load(Ordering::SeqCst) < 9 {
                    assert!(since.elapsed() < Duration::from_secs(20), "nobody took the rest");
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = ThreadPool::new(2);
        let failed = catch_unwind(AssertUnwindSafe(|| {
            pool.run(8, |task, _| assert!(task != 5));
        }));
        assert!(failed.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(8, |task, _| {
            sum.fetch_add(task, Ordering::SeqCst);
        });
        assert_eq!(sum.load(Ordering::SeqCst), 28);
    }

    #[test]
    fn callers_take_turns() {
        let pool = ThreadPool::new(2);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        pool.run(4, |_, _| {
                            sum.fetch_add(1, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(Ordering::SeqCst), 1200);
    }
}
