import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;

/** What a program in Java gets from the library: Check BUNDLE BROKEN... Each line is a fact. */
public final class Check {
    interface Call {
        void run() throws Exception;
    }

    static int code(Call call) throws Exception {
        try {
            call.run();
            return 0;
        } catch (AttnExport.AttnException error) {
            return error.code;
        }
    }

    static AttnExport.Session ready(AttnExport bundle) {
        AttnExport.Session session = bundle.session();
        session.setInput("query", 1, 4, 16);
        session.prefill(64);
        return session;
    }

    /** Runs steps that go back before the cache is full; returns an element of the last output. */
    static float steps(AttnExport.Session session, int count) {
        ByteBuffer query = session.setInput("query", 1, 1, 16);
        for (int i = 0; i < count; i++) {
            if (session.get(AttnExport.HELD) == 64) session.rewind(60);
            query.putFloat(0, 0.5f);
            session.step();
        }
        return session.output("output").getFloat(0);
    }

    static void tryBundle(String folder) {
        try (AttnExport bundle = new AttnExport(folder, null, 1, false)) {
            for (long index = 0; index < bundle.get(AttnExport.CASES); index++) {
                String line = bundle.testCase(index);
                if (!line.startsWith("ok ")) throw new AttnExport.AttnException(8, line);
            }
        }
    }

    static long resident() throws Exception {
        return Long.parseLong(Files.readString(Path.of("/proc/self/statm")).split(" ")[1]) * 4;
    }

    public static void main(String[] folders) throws Exception {
        AttnExport bundle = new AttnExport(folders[0], null, 1, false);
        AttnExport.Session fresh = bundle.session(), session = ready(bundle);
        System.out.println("step without a prefill: " + code(fresh::step));
        System.out.println("wrong size: " + code(() -> fresh.setInput("query", 1, 1, 15)));
        System.out.println("wrong row: " + code(() -> session.fork(1)));
        System.out.println("output before a run: " + code(() -> fresh.output("output")));
        fresh.close();
        System.out.println("closed: " + code(fresh::step) + " " + code(fresh::close));
        for (int at = 1; at < folders.length; at++) {
            String folder = folders[at];
            System.out.println("broken: " + code(() -> tryBundle(folder)));
        }
        float[] together = new float[2];
        Set<Integer> codes = ConcurrentHashMap.newKeySet();
        Thread[] threads = new Thread[2];
        for (int at = 0; at < 2; at++) {
            int own = at;
            threads[at] = new Thread(() -> {
                try (AttnExport.Session mine = ready(bundle)) {
                    together[own] = steps(mine, 200);
                    for (int n = 0; n < 200; n++) codes.add(code(() -> session.rewind(0))); // one session, two threads
                } catch (Exception error) {
                    throw new IllegalStateException(error);
                }
            });
            threads[at].start();
        }
        for (Thread thread : threads) thread.join();
        codes.remove(0);
        codes.remove(4);
        System.out.println("two threads agree: " + (together[0] == together[1]));
        System.out.println("other codes of one session in two threads: " + codes.size());
        bundle.close(); // its sessions still work
        steps(session, 2000);
        System.gc();
        long before = resident();
        steps(session, 10000);
        System.out.println("copied: " + session.get(AttnExport.COPIED));
        System.gc();
        System.out.println("grown: " + (resident() - before));
        session.close();
    }
}
