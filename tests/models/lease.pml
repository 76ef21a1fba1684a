/* Claim, lease and epoch of one session's calls, newest first: the protocol of app/storage/claims.py and app/engine/unwind.py.

   spin -DFAULTS=6 -run -m400000 -noclaim lease.pml    every order of steps: no assertion may fail
   spin -run -m400000 -ltl ends -f lease.pml           once faults stop, the last call is done

   Three tasks, two of them of one worker, which is how a worker meets itself. A lease may run out at any step, a task may lose track of
   what it holds at any step (its commit's answer was lost, or the database was away), or die. FAULTS bounds how often.
   Must not know what a call is about: an answer is an answer. */

#ifndef CALLS
#define CALLS 3
#endif
#ifndef FAULTS
#define FAULTS 4
#endif
#define TASKS 3
#define WORKER(task) ((task) == 0 -> 1 : ((task) == 1 -> 1 : 2))
#define NOBODY 0
#define NOTHING 99

bool due[CALLS];
bool leased[CALLS];   /* the lease has not run out */
byte leased_by[CALLS];
byte epoch[CALLS];
bool written[CALLS];  /* an answer was recorded */

byte holds[TASKS] = NOTHING;  /* what a task believes to hold, and under which epoch */
byte under[TASKS];
bool counted[TASKS];          /* an attempt was counted, and its answer is awaited */
byte faults;

#define is_claimable(call) (due[call] && !leased[call])
#if CALLS > 2
#define any_claimable (is_claimable(0) || is_claimable(1) || is_claimable(2))
#define any_leased (leased[0] || leased[1] || leased[2])
#else
#define any_claimable (is_claimable(0) || is_claimable(1))
#define any_leased (leased[0] || leased[1])
#endif
#define may_write(task, call) (holds[task] == call && under[task] == epoch[call])

inline release(call) { leased_by[call] = NOBODY; leased[call] = false }

/* GIVE_BACK_SQL: only while nobody newer owns the call; then also the very next one, which the task's own write may have left. */
inline give_back(me)
{
  if
  :: holds[me] != NOTHING && under[me] == epoch[holds[me]] ->
     call = 0;
     do
     :: call < CALLS ->
        if
        :: leased_by[call] == WORKER(me) && (call == holds[me] || (call == holds[me] + 1 && epoch[call] == 0)) ->
           other = 0;
           do
           :: other < TASKS -> assert(other == me || !may_write(other, call)); other++  /* nothing is taken from anybody */
           :: else -> break
           od;
           release(call)
        :: else
        fi;
        call++
     :: else -> break
     od
  :: else
  fi;
  holds[me] = NOTHING
}

proctype Task(byte me)
{
  byte call, other;
end_idle:
  do
  :: atomic {  /* CLAIM_SQL */
       holds[me] == NOTHING && any_claimable;
       if
       :: is_claimable(0) -> call = 0
       :: is_claimable(1) -> call = 1
       #if CALLS > 2
       :: is_claimable(2) -> call = 2
       #endif
       fi;
       epoch[call]++; leased[call] = true; leased_by[call] = WORKER(me);
       other = 0;
       do
       :: other < TASKS -> assert(!may_write(other, call)); other++
       :: else -> break
       od;
       holds[me] = call; under[me] = epoch[call]; counted[me] = false; call = 0; other = 0
     }
  :: atomic {  /* WRITE_SQL counts an attempt: refused under an old epoch, else the lease is new */
       holds[me] != NOTHING && !counted[me];
       if
       :: under[me] == epoch[holds[me]] -> leased[holds[me]] = true; counted[me] = true
       :: else -> give_back(me)
       fi;
       call = 0; other = 0
     }
  :: atomic {  /* WRITE_SQL records an answer, and leaves the next call under the same lease, with epoch 0 */
       holds[me] != NOTHING && counted[me];
       if
       :: under[me] == epoch[holds[me]] && !written[holds[me]] ->  /* written: the attempt is not open any more */
          call = holds[me];
          assert(due[call] && leased_by[call] == WORKER(me));
          written[call] = true; due[call] = false; release(call);
          if
          :: call + 1 < CALLS ->
             due[call + 1] = true; leased[call + 1] = true; leased_by[call + 1] = WORKER(me);
             if
             :: holds[me] = call + 1; under[me] = 0  /* its attempt was counted with the same write */
             :: faults < FAULTS -> faults++  /* the commit's answer is lost: the task knows its old claim only */
             fi
          :: else -> holds[me] = NOTHING
          fi
       :: else -> give_back(me)
       fi;
       call = 0; other = 0
     }
  :: atomic {  /* RENEW_SQL: only under the newest epoch, and only what somebody holds; a lease that has not run out stays one */
       holds[me] != NOTHING && !leased[holds[me]] && leased_by[holds[me]] != NOBODY;
       if
       :: under[me] == epoch[holds[me]] -> leased[holds[me]] = true
       :: else -> give_back(me)
       fi;
       call = 0; other = 0
     }
  :: atomic { holds[me] != NOTHING && faults < FAULTS -> faults++; give_back(me); call = 0; other = 0 }  /* lost track */
  :: atomic { holds[me] != NOTHING && faults < FAULTS -> faults++; holds[me] = NOTHING }  /* died */
  od
}

proctype Time()
{
  byte call;
end_time:
  do
  :: atomic { faults < FAULTS -> faults++; call = 0;
       do
       :: call < CALLS -> leased[call] = false; call++
       :: else -> break
       od;
       call = 0 }
  :: atomic {  /* what nobody holds any more runs out by itself, faults or none */
       holds[0] == NOTHING && holds[1] == NOTHING && holds[2] == NOTHING && any_leased; call = 0;
       do
       :: call < CALLS -> leased[call] = false; call++
       :: else -> break
       od;
       call = 0 }
  od
}

init
{
  atomic { due[0] = true; run Task(0); run Task(1); run Task(2); run Time() }
}

ltl ends { <> written[CALLS - 1] }
